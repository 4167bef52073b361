"""Moves gradients from `parameter.grad`, where autograd left them, into the engine's flat buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard.engine.core.copied_gradients import CopiedGradients
from zeroshard.engine.core.sums import SumSlots
from zeroshard.engine.memory.group import Group
from zeroshard.errors import PlanError
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.legs import local_dtype


@dataclass(frozen=True)
class _Cuts:
    """A gradient buffer cut into one view per parameter, and the gaps between parameters."""

    views: list[torch.Tensor]
    gaps: list[torch.Tensor]


class Collector:
    """Copies the gradients of groups into flat buffers.

    Args:
        accumulate: whether the plan has accumulators for several micro-batches.
        sums: where gradients are summed over micro-batches that pass a unit in turn.
        copies: compares gradients of what all ranks of an axis have whole; None without such an axis.
    """

    def __init__(self, *, accumulate: bool, sums: SumSlots, copies: CopiedGradients | None = None) -> None:
        self._accumulate, self._sums, self._copies = accumulate, sums, copies
        self._cuts: dict[tuple[int, int], _Cuts] = {}

    def forget_addresses(self) -> None:
        """Forget the views: the buffers have moved to other addresses."""
        self._cuts.clear()

    def views(self, group: Group, target: torch.Tensor) -> list[torch.Tensor]:
        """One view of a gradient buffer per parameter."""
        return self._cuts_of(group, target).views

    def local(self, group: Group) -> torch.Tensor:
        """The buffer of whole local gradients: the resting gradient, a slot, or one allocated at the first no_sync."""
        plan = group.plan
        assert plan.grad is not None
        if not plan.grad.divided:
            assert group.grad is not None
            return group.grad
        slot = self._sums.of(group)
        if slot is not None:
            return slot
        if group.local is None:
            dtype = torch_dtype(local_dtype(plan, self._accumulate))
            group.local = torch.zeros(plan.layout.numel, dtype=dtype, device=group.device)
        return group.local

    def collect(self, group: Group, received: list[bool], target: torch.Tensor, *, fresh: bool, factor: float) -> None:
        """Move the gradients of a group, times `factor`, into `target`: if `fresh` they overwrite it, else they add."""
        cuts = self._cuts_of(group, target)
        views, grads, empty = [], [], []
        members = zip(cuts.views, group.parameters, self._gradients(group), strict=True)
        for index, (view, parameter, grad) in enumerate(members):
            if grad is None:
                empty.append(view)
                continue
            views.append(view)
            grads.append(_dense(grad, group, index))
            parameter.grad = None
            received[index] = True
        if fresh:
            empty += cuts.gaps
            if empty:
                torch._foreach_zero_(empty)  # the slot still holds another unit's gradients
            if grads:
                torch._foreach_copy_(views, grads)
                if factor != 1.0:
                    torch._foreach_mul_(views, factor)
        elif grads:
            torch._foreach_add_(views, grads, alpha=factor)

    def take(self, group: Group, received: list[bool], factor: float) -> list[torch.Tensor | None]:
        """The gradients of a group times `factor`, taken off their parameters; None where there is none."""
        taken: list[torch.Tensor | None] = []
        for index, (parameter, grad) in enumerate(zip(group.parameters, self._gradients(group), strict=True)):
            if grad is not None:
                grad = _dense(grad, group, index).contiguous()
                grad = grad if factor == 1.0 else grad * factor
                parameter.grad = None
                received[index] = True
            taken.append(grad)
        return taken

    def _gradients(self, group: Group) -> list[torch.Tensor | None]:
        found = group.gradients()
        if self._copies is not None:
            self._copies.note(group, found)
        return found

    def _cuts_of(self, group: Group, target: torch.Tensor) -> _Cuts:
        """The views of a group's gradient buffer; made once, since the buffers do not move."""
        key = (id(group), target.data_ptr())
        found = self._cuts.get(key)
        if found is None:
            layout = group.plan.layout
            views = [target[segment.offset : segment.end].view(segment.shape) for segment in layout.segments]
            found = self._cuts[key] = _Cuts(views, [target[start:end] for start, end in layout.gaps()])
        return found


def _dense(grad: torch.Tensor, group: Group, index: int) -> torch.Tensor:
    if grad.is_sparse:
        name = group.plan.layout.segments[index].name
        raise PlanError(f"parameter {name!r} got a sparse gradient; build its nn.Embedding with sparse=False")
    return grad
