"""Reads of single parameters as DeepSpeed answers them: None for what nothing trains, own gradients under no_sync.

zeroshard's own functions give the values of frozen parameters too. DeepSpeed keeps no float32 copy of those and gives
None, and scripts tell frozen parameters by it. Where a script may read `parameter.grad`, DeepSpeed answers with that,
which is the rank's own gradient; zeroshard's own function sums over the ranks at any time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

import torch

import zeroshard
from deepspeed._adalora import kept_gradient
from zeroshard.engine.memory.guard import own_gradient
from zeroshard.engine.outside_step.gathered import place_of


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """As `zeroshard.safe_get_full_fp32_param`; None for a frozen parameter."""
    return None if _frozen(param) else zeroshard.safe_get_full_fp32_param(param)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """As `zeroshard.safe_get_local_fp32_param`; None for a frozen parameter."""
    return None if _frozen(param) else zeroshard.safe_get_local_fp32_param(param)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """As `zeroshard.safe_get_full_grad`, but for these.

    In no_sync() and coalesce_grad_reduction() it is what this rank accumulated, and no other rank need call. An adapter
    of AdaLoRA has one after the step too, clipped as the step did it.
    """
    own = own_gradient(param.grad) if isinstance(param, torch.Tensor) else None
    if own is not None:
        return own.clone()
    gradient = zeroshard.safe_get_full_grad(param)
    return kept_gradient(param) if gradient is None else gradient


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.Tensor], update_func: Callable[..., torch.Tensor]
) -> None:
    """Replace the whole gradient of each parameter; called by all ranks, between backward and step.

    Args:
        param_list: those without a gradient are left alone.
        update_func: gives the new gradient from the old one; it gets the parameter too, if it takes two arguments.
    """
    takes = [p for p in inspect.signature(update_func).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    with_param = len(takes) > 1 or any(p.kind is p.VAR_POSITIONAL for p in takes)
    for param in param_list:
        gradient = zeroshard.safe_get_full_grad(param)
        if gradient is not None:
            new = update_func(gradient, param) if with_param else update_func(gradient)
            zeroshard.safe_set_full_grad(param, new)


def _frozen(param: object) -> bool:
    """Whether the tensor is a parameter of a sharded model that nothing trains."""
    place = place_of(param) if isinstance(param, torch.Tensor) else None
    return place is not None and not place[2].plan.trainable
