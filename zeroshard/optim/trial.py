"""A trial whether an unknown optimizer is element-wise: it runs on the same numbers as a matrix, and in two slices.

    matrix (4, 6)              --3 steps-->  24 values
    slice (10,), slice (14,)   --3 steps-->  24 values     equal for an element-wise optimizer

A trial can refute this but not prove it. An optimizer that uses random numbers gives other values in every run, so the
trial has no result, and the optimizer is accepted.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.updates import accepted_defaults, group_options

_TORCH_ATTRIBUTES = ("_opt_called", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured")
"""Attributes that torch sets on an optimizer and that are no options."""

_SHAPE = (4, 6)
_CUT = 10
_STEPS = 3
_TOLERANCE = 1e-5
"""Relative and absolute; kernels may order the same operations differently for other shapes."""


def refuse_unlike(optimizer: torch.optim.Optimizer) -> None:
    """Raises PlanError if an optimizer that is made from this one's groups and defaults would differ from it.

    Each rank makes one for the slices that it updates; attributes outside of groups and defaults would be lost.
    """
    name = type(optimizer).__name__
    cure = "keep it in the groups: pass it to Optimizer.__init__ among the defaults"
    try:
        again = _rebuilt(optimizer, [torch.nn.Parameter(torch.zeros(_SHAPE))])
        inspect.signature(again.step).bind()
    except TypeError as error:
        raise PlanError(
            f"optimizer {name} can't be made and stepped for slices of parameters ({error}). Every argument needs a "
            f"default or a place among the groups' defaults, and step() none that is required"
        ) from error
    for key, value in vars(optimizer).items():
        if key in _TORCH_ATTRIBUTES or not _is_plain(value):
            continue
        if key not in vars(again) or vars(again)[key] != value:
            raise PlanError(
                f"optimizer {name} has {key} = {value!r} beside its groups; one that is made for slices of parameters "
                f"has {vars(again).get(key)!r} and would compute something else: {cure}"
            )


def differs_on_slices(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer of the same kind and options gives a matrix other values than two slices of it."""
    numel = _SHAPE[0] * _SHAPE[1]
    generator = torch.Generator().manual_seed(0)
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cpu")
    start = torch.randn(numel, generator=generator)
    gradients = [torch.randn(numel, generator=generator) for _ in range(_STEPS)]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        whole = _run(optimizer, [start.view(_SHAPE)], [[g.view(_SHAPE)] for g in gradients], device)
        again = _run(optimizer, [start.view(_SHAPE)], [[g.view(_SHAPE)] for g in gradients], device)
        cut = [[g[:_CUT], g[_CUT:]] for g in gradients]
        sliced = _run(optimizer, [start[:_CUT], start[_CUT:]], cut, device)
    if not torch.equal(whole, again):
        return False
    return not torch.allclose(whole, sliced, rtol=_TOLERANCE, atol=_TOLERANCE)


def _run(
    optimizer: torch.optim.Optimizer,
    values: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    device: torch.device,
) -> torch.Tensor:
    parameters = [torch.nn.Parameter(value.clone().to(device)) for value in values]
    trial = _rebuilt(optimizer, parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone().to(device)
        trial.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).cpu()


def _rebuilt(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the same class and options over other parameters."""
    kind: Any = type(optimizer)
    options = group_options(optimizer.param_groups[0])
    return kind([{"params": [*parameters], **options}], **accepted_defaults(kind, optimizer.defaults))


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
