"""Whether modules compute the same once their layers are divided as a config names them, for transformers models.

    before      one forward of the whole model on its own example inputs; of each kind of block in which layers will be
                divided, what it was given and what it gave
    after       the same block with divided layers on the same inputs

Code that counts heads by the config's number cuts half of the queries into all heads, and computes on without a word.
Rejected: names of such attributes, by model. Of a model that is not of transformers nobody knows inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zeroshard.errors import PlanError
from zeroshard.model_plan import SPECS
from zeroshard.sharding.resting import is_resting

_CACHE = "use_cache"


@dataclass(frozen=True)
class Seen:
    """A block, and its first forward with whole layers."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: torch.Tensor


def see_whole(model: nn.Module, layers: Mapping[str, str]) -> list[Seen]:
    """Forwards of the blocks in which `layers` will be divided; nothing where example inputs are not known."""
    inputs = getattr(model, "dummy_inputs", None)
    if not isinstance(inputs, Mapping) or any(is_resting(one) or one.is_meta for one in model.parameters()):
        return []
    seen: list[Seen] = []
    hooks = [
        module.register_forward_hook(_taking(path, seen), with_kwargs=True) for path, module in _blocks(model, layers)
    ]
    device = next(model.parameters()).device
    more: dict[str, Any] = {_CACHE: False} if hasattr(getattr(model, "config", None), _CACHE) else {}
    try:
        with _in_evaluation(model):
            model(**{name: value.to(device) for name, value in inputs.items()}, **more)
    except Exception:  # of any kind: the example inputs need not be those of this model
        return []
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def check_divided(seen: Sequence[Seen], ranks: int, device: torch.device) -> None:
    """Compare with the blocks as they are divided now; called by all ranks.

    Raises:
        PlanError: a block can't compute, or gives other values; on all ranks.
    """
    for one in seen:
        where = f"{SPECS}: {one.path or 'the model'!r} over {ranks} ranks"
        one.module.to(device)
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (one.args, one.kwargs))
        try:
            with _in_evaluation(one.module):
                found = _first(one.module(*args, **kwargs))
        except Exception as error:  # of any kind: a shape that does not fit may fail anywhere in the block
            line = (str(error).strip().splitlines() or [""])[0]
            raise PlanError(
                f"{where} can't compute with the layers that are named ({type(error).__name__}: {line}). A layer by "
                "column gives each rank a part of its output, which a layer by row has to take: name both, or neither. "
                "Code that counts heads by a number of its own can't be divided so"
            ) from error
        gap = _gap(found, one.output.to(device))
        if gap is None or gap > torch.finfo(one.output.dtype).eps ** 0.5:
            what = "another shape" if gap is None else f"values that are {gap:.1%} apart"
            raise PlanError(
                f"{where} gives {what} from those of the whole block: its code counts on whole layers (a number of "
                "heads, several weights in one). Leave them out, or leave partition_config out for the model's own plan"
            )


def _blocks(model: nn.Module, layers: Mapping[str, str]) -> Iterator[tuple[str, nn.Module]]:
    """The smallest modules around each layer in which layers of both types are; one of each kind."""
    kinds: set[tuple[type[nn.Module], tuple[str, ...]]] = set()
    paths: set[str] = set()
    for path, kind in layers.items():
        other = "row" if kind == "column" else "column"
        block = (
            path
            if isinstance(model.get_submodule(path), nn.Embedding) and kind == "row"
            else _around(path, layers, other)
        )
        inside = tuple(sorted(name[len(block) :] for name in layers if name == block or _within(name, block)))
        key = type(model.get_submodule(block)), inside
        if block not in paths and key not in kinds:
            paths.add(block)
            kinds.add(key)
            yield block, model.get_submodule(block)


def _around(path: str, layers: Mapping[str, str], other: str) -> str:
    block = path
    while block:
        block = block.rpartition(".")[0]
        if any(kind == other and _within(name, block) for name, kind in layers.items()):
            return block
    return ""


def _within(path: str, block: str) -> bool:
    return not block or path.startswith(f"{block}.")


def _taking(path: str, seen: list[Seen]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        first = _first(output)
        if first is not None and not any(one.path == path for one in seen):
            seen.append(Seen(path, module, args, kwargs, first))

    return hook


def _first(output: object) -> torch.Tensor | None:
    """The first tensor with numbers of a result."""
    leaves = pytree.tree_leaves(output)
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()), None)


def _gap(found: torch.Tensor | None, wanted: torch.Tensor) -> float | None:
    """The norm of the difference as a part of that of `wanted`; None for another shape."""
    if found is None or found.shape != wanted.shape:
        return None
    size = torch.linalg.vector_norm(wanted.double())
    return float(torch.linalg.vector_norm(found.double() - wanted.double()) / size.clamp_min(1e-30))


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was in training.items():
            module.training = was
