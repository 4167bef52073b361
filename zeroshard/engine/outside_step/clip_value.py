"""Clips gradients by value: each rank limits the elements that it updates, in place.

The limit applies to gradients that are averaged over the ranks and unscaled, so the result equals that of one process.
Nothing is sent. Rejected: a limit in the update's kernels; every kernel and tier would need it, for a rare option.
"""

from __future__ import annotations

import torch
from torch import nn

from zeroshard.engine.core.autograd import in_backward
from zeroshard.engine.core.handle import Handle, handle_of
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.update_view import update_grad
from zeroshard.engine.step.attached import stepper_of
from zeroshard.errors import UsageError


def clip_grad_value_(model: nn.Module, clip_value: float) -> None:
    """Hold each element of the gradients within [-clip_value, clip_value]; called by all ranks before the step.

    The limit applies to averaged gradients without the loss scale. Elements that are not finite stay so, and the step
    detects them. A limit of the norm (`clip_norm`, `gradient_clipping`) is applied afterwards.

    Raises:
        UsageError: there are no gradients, a limit that is not above 0, or an optimizer that averages by itself.
    """
    if not clip_value > 0:
        raise UsageError(f"clip_grad_value_: clip_value {clip_value} must be above 0")
    handle, stepper = handle_of(model), stepper_of(model)
    runtime = handle.runtime
    if in_backward() or not runtime.gradients.present:
        raise UsageError("clip_grad_value_: there is no gradient; call it after the backward and before the step")
    if runtime.reduce_policy.keeps_local:
        raise UsageError(
            "clip_grad_value_: this optimizer averages its momentum in compressed form, and each rank's gradients are "
            "its own; clip the loss instead, or use another optimizer"
        )
    runtime.drain()
    runtime.finish_gradients()
    limit = clip_value / stepper.unscale()
    for unit in runtime.units:
        if unit.gradients.reduced:
            for group in unit.trainable:
                _clip(handle, group, limit)
    stepper.gradients_changed()


def _clip(handle: Handle, group: Group, limit: float) -> None:
    if group.plan.grad_off_device:
        handle.runtime.streams.drain()
        handle.runtime.streams.wait_on_host()
    gradient = update_grad(group)
    gradient.copy_(torch.where(gradient.isfinite(), gradient.clamp(-limit, limit), gradient))
    handle.runtime.gradients.squares.changed(group)
