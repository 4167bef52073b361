"""The layers that `tensor_parallel.partition_config` names, and their division by torch's parallelize_module.

    column    rows of the weight, columns of its transpose: each rank gives its part of the output
    row       columns of the weight: each rank takes its part of the input, and the results are summed

Where the model brings a plan of its own, a layer is divided as this plan says what happens around it (an output that
is gathered), and one that it cuts in another way (several weights in one) is refused. Rejected: to take the patterns at
their word; a column of queries, keys and values in one weight is none of heads, and the model computes on without a
word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.errors import PlanError
from zeroshard.model_plan import SPECS, expanded

_SPEC_KEYS = frozenset({"patterns", "partition_type"})
_TYPES = ("column", "row", "skip")
_LIKE = {
    "column": ("colwise", "colwise_gather_output", "colwise_rep", "embedding_colwise"),
    "row": ("rowwise", "rowwise_split_input", "rowwise_rep", "embedding_rowwise"),
}
"""Styles of transformers' plans that a layer of each type may have there."""
_GATHERED = ("colwise_gather_output", "colwise_rep", "embedding_colwise")
_SPLIT_BEFORE = ("rowwise_split_input", "rowwise_rep")
_PARTIAL = "replicated_with_grad_allreduce"


def layers_of(model: nn.Module, partition: object, ranks: int, *, all_of_it: bool) -> dict[str, str]:
    """The layers that the patterns name, and how each is divided; nothing is changed.

    Args:
        partition: the config's `partition_config`.
        all_of_it: the model is a whole one, of which the patterns must name something.

    Raises:
        PlanError: what is not built, or does not divide by `ranks`.
    """
    specs = partition.get("layer_specs") if isinstance(partition, Mapping) else None
    if not isinstance(specs, (list, tuple)) or (isinstance(partition, Mapping) and partition.get("use_default_specs")):
        raise PlanError(
            f"{SPECS}: give layer_specs, and use_default_specs false; or leave it out for the model's own plan"
        )
    found: dict[str, str] = {}
    for number, spec in enumerate(specs):
        where = f"{SPECS}.layer_specs[{number}]"
        patterns, kind = _read(spec, where)
        for path, module in model.named_modules():
            if any(pattern.fullmatch(f"{path}.weight") for pattern in patterns) and _has_matrix(module, path, kind):
                found.setdefault(path, kind)
    layers = {path: kind for path, kind in found.items() if kind != "skip"}
    if not layers and all_of_it:
        raise PlanError(
            f"{SPECS}: its patterns name no linear layer of the model; they match NAME.weight from end to end"
        )
    for path, kind in layers.items():
        _check_size(model.get_submodule(path), path, kind, ranks)
    _check_shared(model, layers)
    return layers


def divide_layers(model: nn.Module, axis: DeviceMesh, layers: Mapping[str, str]) -> None:
    """Divide them. Raises PlanError, before anything is changed, where the model's own plan does otherwise."""
    from torch.distributed.tensor.parallel import parallelize_module

    own = styles_of_model(model)
    _check_styles(layers, own)
    shared = _names(model)  # before: each gets a weight of its own
    parallelize_module(model, axis, {path: _style(model, path, kind, own.get(path)) for path, kind in layers.items()})
    for paths in shared:
        divided = next((path for path in paths if path in layers), None)
        if divided is not None:
            for path in paths:
                model.get_submodule(path)._parameters["weight"] = model.get_submodule(divided)._parameters["weight"]


def styles_of_model(model: nn.Module) -> dict[str, str]:
    """By path, the style of each module in the model's own plan; nothing for a model that brings none."""
    plan = getattr(model, "tp_plan", None)
    return expanded(model, plan) if isinstance(plan, Mapping) and plan else {}


def _read(spec: object, where: str) -> tuple[list[re.Pattern[str]], str]:
    """Patterns and type of an entry."""
    if not isinstance(spec, Mapping):
        raise PlanError(f"{where} is {spec!r}: give an object with patterns and partition_type")
    unknown = sorted(set(spec) - _SPEC_KEYS)
    kind = str(spec.get("partition_type", "column")).lower()
    if unknown or kind not in _TYPES:
        raise PlanError(
            f"{where} has {', '.join(unknown) or f'partition_type {kind!r}'}: patterns and partition_type "
            f"({', '.join(_TYPES)}) are built"
        )
    texts = spec.get("patterns", ())
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise PlanError(f"{where}.patterns is {texts!r}: give a list of regular expressions")
    try:
        return [re.compile(text) for text in texts], kind
    except re.error as error:
        raise PlanError(f"{where}.patterns: {error.pattern!r} is no regular expression ({error})") from error


def _has_matrix(module: nn.Module, path: str, kind: str) -> bool:
    """Whether a layer that a pattern names is divided. Raises PlanError for a matrix that can't be."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim < 2:
        return False
    if kind != "skip" and (not isinstance(module, (nn.Linear, nn.Embedding)) or not weight.is_floating_point()):
        raise PlanError(
            f"{SPECS} names {path!r}, a {type(module).__name__} with a weight of {tuple(weight.shape)} in "
            f"{str(weight.dtype).removeprefix('torch.')}: torch divides nn.Linear and nn.Embedding in floating point; "
            "leave the layer out, or give it partition_type skip in an entry before"
        )
    return True


def _check_size(module: nn.Module, path: str, kind: str, ranks: int) -> None:
    if isinstance(module, nn.Linear):
        what, size = ("in_features", module.in_features) if kind == "row" else ("out_features", module.out_features)
    else:
        assert isinstance(module, nn.Embedding)
        rows, width = ("num_embeddings", module.num_embeddings), ("embedding_dim", module.embedding_dim)
        what, size = rows if kind == "row" else width
    if size % ranks:
        raise PlanError(f"{SPECS}: {what} of {path!r} is {size}, which {ranks} ranks do not divide; leave it out")


def _names(model: nn.Module) -> list[list[str]]:
    """The paths of modules that have one weight together."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None:
            found.setdefault(id(weight), []).append(path)
    return [paths for paths in found.values() if len(paths) > 1]


def _check_shared(model: nn.Module, layers: Mapping[str, str]) -> None:
    """A weight with several names is divided along one dim, or not at all."""
    for paths in _names(model):
        dims = {path: _dim(model.get_submodule(path), layers.get(path)) for path in paths}
        if len(set(dims.values())) > 1:
            said = ", ".join(f"{path!r} {layers.get(path, 'not divided')}" for path in paths)
            raise PlanError(
                f"{SPECS}: modules that share one weight are divided in different ways ({said}), and would part; "
                "an embedding by row goes with a head by column, or leave both out"
            )


def _dim(module: nn.Module, kind: str | None) -> int | None:
    if kind is None:
        return None
    return int((kind == "row") == isinstance(module, nn.Linear))


def _check_styles(layers: Mapping[str, str], own: Mapping[str, str]) -> None:
    for path, kind in layers.items():
        style = own.get(path)
        if style is not None and style not in _LIKE[kind]:
            raise PlanError(
                f"{SPECS} divides {path!r} by {kind}, but the model's own plan says {style}: its outputs are not those "
                f"of a plain linear layer. Leave partition_config out, and the model's plan divides it"
            )
    parents = {path.rpartition(".")[0] for path in layers}
    for path, style in own.items():
        if style == _PARTIAL and path.rpartition(".")[0] in parents:
            raise PlanError(
                f"{SPECS}: beside the layers that it names, the gradient of {path!r} has to be summed over the ranks, "
                "as the model's own plan says. Leave partition_config out, and the model's plan divides it"
            )


def _style(model: nn.Module, path: str, kind: str, own: str | None) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if kind == "column":
        return ColwiseParallel(output_layouts=Replicate()) if own in _GATHERED else ColwiseParallel()
    whole = own in _SPLIT_BEFORE or isinstance(model.get_submodule(path), nn.Embedding)
    return RowwiseParallel(input_layouts=Replicate()) if whole else RowwiseParallel()
