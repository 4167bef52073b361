"""Divides a model over an axis of tensor parallelism, as a config asks for it: by the plan that the model brings.

    autotp_size 2                       transformers' own `base_model_tp_plan`, applied by transformers
    autotp_size 2, partition_config     the layers that its patterns name, by torch's parallelize_module

Nothing here knows any model. What a plan can't divide is refused with the numbers, before any rank has changed a
parameter. Rejected: rules by names of layers, which are right for the models that somebody has tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroshard.errors import PlanError
from zeroshard.mesh import TENSOR
from zeroshard.sharding.dtensors import as_dtensor, axes_of_model
from zeroshard.sharding.resting import is_resting

AUTOTP = "tensor_parallel.autotp_size"
SPECS = "tensor_parallel.partition_config"
_HEADS = ("num_attention_heads", "num_key_value_heads")
_SPEC_KEYS = frozenset({"patterns", "partition_type"})
_TYPES = ("column", "row", "skip")


def divide_by_plan(
    model: nn.Module,
    ranks: int,
    device_type: str,
    partition: Mapping[str, Any] | None = None,
    *,
    staged: bool = False,
) -> dict[int, nn.Parameter]:
    """Divide `model` over `ranks` neighbours; called by all ranks. What of it is divided already stays as it is.

    Args:
        partition: DeepSpeed's `partition_config`: which layers are divided, in place of the model's plan.
        staged: the model is one stage of a pipeline, which may have none of the layers that are named.

    Returns:
        By the id of each parameter that the model had, the one that it has in its place.

    Raises:
        PlanError: the world, the heads or a dim does not divide by `ranks`; the model brings no plan.
    """
    if TENSOR in axes_of_model(model):
        return {}
    world = dist.get_world_size() if dist.is_initialized() else 1
    absent = next((name for name, one in model.named_parameters() if one.is_meta or is_resting(one)), None)
    if absent is not None:
        raise PlanError(
            f"{AUTOTP}: parameter {absent!r} has no values here (zero.Init, the meta device); build the model outside "
            "of it, or let transformers load it with tp_plan='auto'"
        )
    if world % ranks:
        raise PlanError(f"{AUTOTP} {ranks} does not divide the {world} ranks that run")
    check_heads(model, ranks)
    plan = None if partition is not None else own_plan(model)
    apply = None if plan is None else _applying()
    layers = {} if partition is None else _layers_of(model, partition, all_of_it=not staged)
    before = dict(model.named_parameters(remove_duplicate=False))
    mesh = init_device_mesh(device_type, (world // ranks, ranks), mesh_dim_names=("dp_shard", "tp"))
    if plan is None or apply is None:
        _divide_layers(model, mesh["tp"], layers)
    else:
        apply(model, mesh["tp"], expanded(model, plan))
        tie = getattr(model, "tie_weights", None)
        if callable(tie):  # each name of a tied weight got a parameter of its own
            tie()
    after = dict(model.named_parameters(remove_duplicate=False))
    return {id(parameter): after[name] for name, parameter in before.items()}


def check_heads(model: nn.Module, ranks: int) -> None:
    """Each rank has whole heads. Raises PlanError with the numbers."""
    config = getattr(model, "config", None)
    text_of = getattr(config, "get_text_config", None)
    text = text_of() if callable(text_of) else config
    for name in _HEADS:
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise PlanError(
                f"{AUTOTP} {ranks}: the model's {name} is {heads}, which {ranks} ranks do not divide; choose a divisor"
            )


def own_plan(model: nn.Module) -> Mapping[str, str]:
    """The plan of a transformers model. Raises PlanError for a model that has none."""
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise PlanError(
            f"{AUTOTP}: {type(model).__name__} brings no plan of tensor parallelism (a base_model_tp_plan); "
            f"name its layers in {SPECS}, or divide it with torch's parallelize_module before"
        )
    return plan


def _applying() -> Callable[..., object]:
    """What transformers applies a plan with. Raises PlanError where this transformers has it not."""
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise PlanError(
            f"{AUTOTP}: the model's plan is applied by transformers 5.24 or later, and the one that is installed can't "
            f"({error}). Load the model with tp_plan='auto', name its layers in {SPECS}, or update transformers"
        ) from error
    return apply_tensor_parallelism


def expanded(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan with the numbers of layers in place of `*`: each parameter before its module, as transformers wants it.

    Modules of experts that are divided over ranks of their own are left out: they have them whole.
    """
    found: dict[str, str] = {}
    first_names = {name for name, _ in model.named_parameters()}
    for path, module in model.named_modules():
        if any(as_dtensor(parameter) is not None for parameter in module.parameters(recurse=False)):
            continue
        style = plan.get(_general(path))
        for name, _ in module.named_parameters(recurse=False):
            whole = f"{path}.{name}" if path else name
            own = plan.get(_general(whole), style)
            if own is not None and whole in first_names:
                found[whole] = own
        if style is not None and path:
            found[path] = style
    return found


def _general(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _layers_of(model: nn.Module, partition: Mapping[str, Any], *, all_of_it: bool) -> dict[str, str]:
    """The linear layers that the patterns name, and how each is divided. Raises PlanError for what is not built.

    Args:
        all_of_it: the model is a whole one, of which the patterns must name something.
    """
    specs = partition.get("layer_specs")
    if partition.get("use_default_specs") or not isinstance(specs, (list, tuple)):
        raise PlanError(
            f"{SPECS}: give layer_specs, and use_default_specs false; or leave it out for the model's own plan"
        )
    found: dict[str, str] = {}
    for number, spec in enumerate(specs):
        where = f"{SPECS}.layer_specs[{number}]"
        unknown = sorted(set(spec) - _SPEC_KEYS)
        kind = str(spec.get("partition_type", "column")).lower()
        if unknown or kind not in _TYPES:
            raise PlanError(
                f"{where} has {', '.join(unknown) or f'partition_type {kind!r}'}: patterns and partition_type "
                f"({', '.join(_TYPES)}) are built"
            )
        for path, module in model.named_modules():
            named = any(re.fullmatch(pattern, f"{path}.weight") for pattern in spec.get("patterns", ()))
            if named and isinstance(module, (nn.Linear, nn.Embedding)):
                found.setdefault(path, kind)
    layers = {path: kind for path, kind in found.items() if kind != "skip"}
    if not layers and all_of_it:
        raise PlanError(
            f"{SPECS}: its patterns name no linear layer of the model; they match NAME.weight from end to end"
        )
    return layers


def _divide_layers(model: nn.Module, axis: DeviceMesh, layers: Mapping[str, str]) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    parallelize_module(model, axis, {path: styles[kind]() for path, kind in layers.items()})
