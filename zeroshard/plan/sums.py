"""The slots in which gradients are summed over the micro-batches that pass a unit in turn, before their only reduce."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.groups import UnitPlan
from zeroshard.plan.legs import local_dtype
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.sharding.slots import SlotPlan, assign_slots


def sum_nbytes(unit: UnitPlan, micro_batches: int) -> int:
    """Bytes in which a unit's whole gradients are summed over the micro-batches that pass it in turn.

    0 with one micro-batch, and for gradients that rest whole, which are summed where they rest.
    """
    if micro_batches == 1:
        return 0
    divided = (group for group in unit.groups if group.grad is not None and group.grad.divided)
    return sum(group.layout.numel * itemsize(local_dtype(group, accumulate=False)) for group in divided)


def sum_slots(
    units: Sequence[UnitPlan], order: Sequence[int], policy: ExecutionPolicy, kept: Sequence[int]
) -> SlotPlan:
    """Slots in which gradients are summed over micro-batches before their reduce.

    A unit's sum is complete before that of the next unit begins, so one slot serves all, except for units whose
    gradients come at several places of the backward.
    """
    sizes = [sum_nbytes(unit, policy.micro_batches) for unit in units]
    summed = [index for index in dict.fromkeys(reversed(order)) if sizes[index]]
    apart = set(spread_units(units, order, kept))
    return assign_slots(summed, sizes, distance=0, dedicated=[index for index in summed if index in apart])


def spread_units(units: Sequence[UnitPlan], order: Sequence[int], kept: Sequence[int]) -> list[int]:
    """The units whose gradients come at several places of the backward."""
    runs = Counter(unit for unit, _ in groupby(order))
    return [index for index, unit in enumerate(units) if unit.name == "" or index in kept or runs[index] > 1]
