"""Detects what user code did to a model's parameters between two steps, and refuses changes that would be lost.

    in place (p.mul_, load_state_dict)          kept where the parameter rests whole, and master weights follow;
                                                refused where it is sharded
    other data (p.data = ..., model.to(dtype))  refused: the step writes elsewhere
    p.grad set to None or to another tensor     refused, unless it is None everywhere (zero_grad)
    requires_grad switched on                   refused in a pass with gradients: the plan has none for it

It reads version counters, addresses and types, and values only of frozen parameters whose counter a forward has
incremented, so it launches no kernel otherwise. Rejected: comparing values with their master weights in each step.
In-place changes of `p.data` have no counter; changes.py looks for those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import nn

from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.guard import ShardedGradient
from zeroshard.engine.memory.rank_values import rank_range, read_values, update_master_weights
from zeroshard.engine.memory.unit import Unit
from zeroshard.errors import UsageError
from zeroshard.plan.dtypes import is_packed
from zeroshard.sharding.dtensors import holder_of
from zeroshard.sharding.resting import is_resting, unguarded

_CHANGE = (
    "change parameters inside zeroshard.GatheredParameters(parameters, modifier_rank=0), which gathers them and keeps "
    "the change on all ranks"
)
_LOST = (
    "was changed in place while it was sharded or gathered for a forward alone (as nn.Embedding does with max_norm), "
    f"so the change is lost or known to this rank alone; {_CHANGE}. What a forward changes needs a plan where it "
    "rests whole: stages 0 to 2, or Recipe(overrides={unit: zeroshard.STAGES[2]})"
)
_ELSEWHERE = f"was given other data, which no step would update; {_CHANGE}"
_HELD = (
    "is whole in an open zeroshard.GatheredParameters block, whose values a step would not update; leave the block "
    "before optimizer.step()"
)
_INSTEAD = (
    "which would be lost; change its values in place under torch.no_grad() where parameters rest whole (stages 0 to "
    "2), or between steps inside zeroshard.GatheredParameters(parameters, modifier_rank=0)"
)
_REPLACED = f"was given other data while it was gathered (parameter.data = ..., in a forward say), {_INSTEAD}"
_WRITTEN = (
    "was changed in place while it was gathered, in a forward or in its recomputation (parameter.data.clamp_(...), "
    f"say), {_INSTEAD}"
)
_CODES = (
    "holds packed numbers, and its module gave it other data (a layer that keeps a second copy of its codes, say): use "
    "another kind of quantization (load_in_4bit, load_in_8bit, torchao), or a floating dtype"
)
_RESIZED = "has another shape than when the model was sharded; resize it before shard() or initialize()"
_DTYPE = "choose the dtype before shard(), or a precision in the plan or config"
_FROZEN = (
    "was frozen when the model was sharded and requires a gradient now, which the plan has not; unfreeze it before "
    "shard(), and freeze it afterwards with requires_grad_(False)"
)
_UNCOLLECTED = (
    "has a gradient that the engine did not collect: it was assigned, or the backward did not pass through any output "
    "of the model's forward (tensors, or tuples, lists, mappings, objects of them)"
)
_TAKEN = (
    "had its gradient taken away since its backward, but the engine still holds it; drop all with zero_grad(), "
    "or leave a parameter out with requires_grad_(False) before the forward"
)
_EARLY = (
    "got its gradient before that of any output of the model's forward, so it would be lost; return what the loss is "
    "made of from forward() (tensors, or tuples, lists, mappings, objects of them), and use parameters in modules only"
)


class Inspection:
    """Compares the version counters of a model's parameters with those at the last inspection."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self._versions: dict[int, int] = {}
        with unguarded():
            for _, group in self._groups():
                for holder in group.holders:
                    self._accept(holder)

    def accept(self, parameter: torch.Tensor) -> None:
        """Accept the parameter's present version: its values have been stored, or were restored."""
        self._accept(holder_of(parameter))

    def _accept(self, holder: torch.Tensor) -> None:
        self._versions[id(holder)] = holder._version

    def accept_rewritten(self, unit: Unit) -> None:
        """Accept writes of a forward to frozen sharded parameters that have left their values as they are.

        torch's parametrizations make such writes, and so do adapters that use them for the time of a forward (peft's
        `target_parameters`). Each rank compares the part that it keeps. Called while the unit is in use.
        """
        for group in unit.groups:
            if group.plan.trainable or not group.plan.param.divided:
                continue
            for index, holder in enumerate(group.holders):
                if holder._version != self._versions[id(holder)] and _as_kept(group, index, holder):
                    self._accept(holder)

    def take_over(self) -> None:
        """Update master weights after changes in place. Raises UsageError for changes that would be lost."""
        with unguarded():
            for unit, group in self._groups():
                for index, holder in enumerate(group.holders):
                    if holder._version != self._versions[id(holder)]:
                        self._changed(unit, group, index, holder)

    def _changed(self, unit: Unit, group: Group, index: int, holder: torch.Tensor) -> None:
        parameter, sharded = group.parameters[index], group.plan.param.divided
        if (
            sharded
            and not is_resting(parameter)
            and (not unit.in_use or index in group.opened)
            and not unit.gathered_beside
        ):
            return  # inside a GatheredParameters block, which checks for changes itself
        self._accept(holder)
        if sharded:
            _refuse(group, index, _LOST)
        if group.master is not None and holder.shape == group.views[index].shape:
            with torch.no_grad():
                update_master_weights(group, index, holder.detach())

    def before_pass(self) -> None:
        """Raises UsageError if parameters no longer have the shape, dtype or requires_grad that were sharded."""
        with unguarded():
            for _, group in self._groups():
                dtype, trainable = group.dtype, group.plan.trainable
                for index, (parameter, holder) in enumerate(zip(group.parameters, group.holders, strict=True)):
                    if holder.shape != group.views[index].shape:
                        _refuse(group, index, _RESIZED)
                    if parameter.dtype != dtype:
                        _refuse(group, index, f"was sharded as {dtype} and is {parameter.dtype} now; {_DTYPE}")
                    if parameter.requires_grad and not trainable and torch.is_grad_enabled():
                        _refuse(group, index, _FROZEN)

    def before_step(self, *, present: bool) -> None:
        """After `take_over`. Raises UsageError for data and gradients that the step would not see.

        Args:
            present: whether the engine holds gradients.
        """
        with unguarded():
            for unit, group in self._groups():
                self._before_step(unit, group, present)

    def _before_step(self, unit: Unit, group: Group, present: bool) -> None:
        elsewhere = group.replaced(also_opened=True) if unit.in_use else group.not_resting()
        if elsewhere is not None and not unit.gathered_beside:
            _refuse(group, elsewhere, _HELD if elsewhere in group.opened else _ELSEWHERE)
        if not group.plan.trainable:
            return
        for index, parameter in enumerate(group.parameters):
            gradient = parameter.grad
            if gradient is None and present:
                _refuse(group, index, _TAKEN)
            if gradient is not None and not isinstance(gradient, ShardedGradient):
                _refuse(group, index, _UNCOLLECTED)

    def _groups(self) -> Iterator[tuple[Unit, Group]]:
        for unit in self._units:
            for group in unit.groups:
                yield unit, group


@torch.no_grad()
def _as_kept(group: Group, index: int, holder: torch.Tensor) -> bool:
    """Whether a whole parameter has the values that this rank keeps of it, byte for byte."""
    segment, (start, end) = group.plan.layout.segments[index], rank_range(group)
    low, high = max(segment.offset, start), min(segment.end, end)
    if low >= high or index in group.opened:
        return index not in group.opened
    kept = read_values(group, slice(low - start, high - start), device=group.device)
    shown = holder.detach().reshape(-1)[low - segment.offset : high - segment.offset]
    return kept.dtype is shown.dtype and torch.equal(kept.view(torch.uint8), shown.view(torch.uint8))


def refuse_replaced(group: Group) -> None:
    """Raises UsageError if a parameter in use was given other data, which would be lost at the unit's release."""
    index = group.replaced()
    if index is not None:
        _refuse(group, index, _REPLACED)


def refuse_written(unit: Unit, number: int) -> NoReturn:
    """Raises UsageError for a parameter, by its number in the unit, that was written on while it was gathered."""
    for group in unit.groups:
        if number < len(group.parameters):
            _refuse(group, number, _WRITTEN)
        number -= len(group.parameters)
    raise AssertionError(f"unit {unit.label!r} has no parameter of number {number}")


def refuse_leftover(group: Group, index: int, parameter: nn.Parameter, *, present: bool) -> None:
    """Before a backward, look at what the one before it has left on a parameter.

    Args:
        present: the engine holds gradients, of earlier micro-batches.

    Raises:
        UsageError: a gradient came before the engine noticed the backward, so it would be lost; or the script has
            dropped the gradient of this parameter alone, which the engine still holds.
    """
    gradient = parameter.grad
    if gradient is None and present:
        _refuse(group, index, _TAKEN)
    if gradient is not None and not isinstance(gradient, ShardedGradient):
        parameter.grad = None
        _refuse(group, index, _EARLY)


def _refuse(group: Group, index: int, what: str) -> NoReturn:
    if what in (_ELSEWHERE, _REPLACED) and is_packed(group.plan.param.dtype):
        what = _CODES
    raise UsageError(f"parameter {group.plan.layout.segments[index].name!r} {what}")
