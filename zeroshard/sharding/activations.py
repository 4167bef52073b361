"""Activation checkpointing around the blocks of a model: only a block's inputs are kept, the rest is recomputed.

    forward     inputs of block 0 | inputs of block 1 | ...     on the device, or copied to the host beside compute
    backward    ... | block 1 again, then its backward | block 0 again, then its backward

The blocks are units, so a unit is gathered once for the recomputation of its block and for its backward. The method is
that of Chen et al. 2016 (arXiv:1604.06174), done by torch.utils.checkpoint; this module chooses the blocks, and whether
their inputs are moved to host memory. Rejected: torch's wrapper modules, which rename every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from zeroshard.errors import PlanError, UsageError
from zeroshard.sharding.units import find_units

_MARK = "_zeroshard_checkpointed"
_ATEN = torch.ops.aten
KEPT_RESULTS = (
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
)
"""What the selective policy keeps: results of matrix products and attention, which are expensive to recompute."""
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def checkpoint_activations(
    model: nn.Module,
    *,
    every: int = 1,
    number: int | None = None,
    selective: bool = False,
    on_host: bool = False,
    units: Sequence[str] | None = None,
    context_fn: ContextFn | None = None,
    use_reentrant: bool = False,
) -> list[str]:
    """Checkpoint the activations of blocks of `model`. Call it before or after shard(), before the first forward.

    Args:
        every: checkpoint one of so many consecutive blocks; 1 checkpoints all.
        number: checkpoint so many blocks, evenly spread, instead; all if there are not more.
        selective: keep results of matrix products and attention, and recompute only what is cheap.
        on_host: keep the inputs of blocks in host memory between forward and backward.
        units: module paths of the blocks, instead of the ones that are found.
        context_fn: passed to torch.utils.checkpoint, to keep other results than `selective` does.
        use_reentrant: use torch's older implementation, a nested backward.

    Returns:
        Paths of the checkpointed modules.

    Raises:
        PlanError: there is no block to checkpoint.
        UsageError: a block is checkpointed already, an argument is out of range, or two exclude each other.
    """
    if every < 1:
        raise UsageError(f"checkpoint_activations: every={every} must be 1 or more")
    if number is not None and (number < 1 or every != 1):
        raise UsageError(f"checkpoint_activations: number={number} must be 1 or more, and every be left out")
    if selective and context_fn is not None:
        raise UsageError("checkpoint_activations: give selective or a context_fn, not both")
    if selective:
        context_fn = partial(create_selective_checkpoint_contexts, list(KEPT_RESULTS))
    if use_reentrant and context_fn is not None:
        raise UsageError("checkpoint_activations: selective and context_fn need use_reentrant=False")
    chosen = _spread(_blocks(model, units)[::every], number)
    if not chosen:
        raise PlanError(f"checkpoint_activations: {type(model).__name__} has no blocks; name some with units=[...]")
    options: dict[str, Any] = {"use_reentrant": use_reentrant}
    if context_fn is not None:
        options["context_fn"] = context_fn
    for name in chosen:
        module = model.get_submodule(name)
        if _MARK in module.__dict__:
            raise UsageError(f"checkpoint_activations: {name!r} is checkpointed already")
        # An attribute of this instance: hooks, parameter names and the class don't change.
        module.forward = partial(run_checkpointed, module.forward, on_host, options)
        module.__dict__[_MARK] = True
    return chosen


def is_checkpointed(model: nn.Module) -> bool:
    """Whether `checkpoint_activations` has been called on `model`."""
    return any(_MARK in module.__dict__ for module in model.modules())


def _spread(names: list[str], number: int | None) -> list[str]:
    """`number` evenly spread names: the first of each of so many parts."""
    if number is None or number >= len(names):
        return names
    return [names[index * len(names) // number] for index in range(number)]


def _blocks(model: nn.Module, units: Sequence[str] | None) -> list[str]:
    """The units that have submodules: a large leaf, such as an embedding, has nothing to recompute."""
    named = [unit.name for unit in find_units(model, units)]
    return [name for name in named if name and next(model.get_submodule(name).children(), None) is not None]


def run_checkpointed(
    forward: Callable[..., Any], on_host: bool, options: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Call `forward` under torch's checkpoint with `options`; `on_host` keeps its inputs in host memory."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with saved_tensors_hooks(_to_host, _to_device) if on_host else nullcontext():
        return checkpoint(forward, *args, **options, **kwargs)


_Saved = torch.Tensor | tuple[torch.Tensor, torch.device, torch.cuda.Event]
"""A tensor that autograd saves: itself, or its host copy, its device, and when the copy is complete."""


def _to_host(tensor: torch.Tensor) -> _Saved:
    if tensor.device.type != "cuda" or isinstance(tensor, nn.Parameter):
        return tensor
    compute, copies = torch.cuda.current_stream(tensor.device), torch.cuda.Stream(tensor.device)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copies.wait_stream(compute)  # read after write: compute must have written the tensor
    with torch.cuda.stream(copies):
        host.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record(copies)
    tensor.record_stream(copies)  # write after read: its memory is not reused before the copy has run
    return host, tensor.device, done


def _to_device(saved: _Saved) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    host, device, done = saved
    torch.cuda.current_stream(device).wait_event(done)  # read after write: the copy to the host must have finished
    return host.to(device, non_blocking=True)
