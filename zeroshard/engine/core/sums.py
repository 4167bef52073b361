"""Which unit's gradients are summed in which slot, where several micro-batches pass a unit in turn.

The plan lets consecutive units share a slot, since a unit is reduced before the sum of the next one begins. In the
first step, or where the backward comes to units in another order than the plan's, a unit may have to wait for its
reduce; the next one is then summed in memory of its own until the step. Rejected: such memory for every unit, as
`no_sync` takes it, which would be that of the whole model's gradients.
"""

from __future__ import annotations

import torch

from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.unit import Unit


class SumSlots:
    """The slots of a plan's sums, and what is summed beside them.

    Args:
        of_unit: the slot of each unit; () where the plan has none.
    """

    def __init__(self, of_unit: tuple[int | None, ...] = ()) -> None:
        self._slots = of_unit
        self._holder: dict[int, Unit] = {}
        self._beside: dict[int, torch.Tensor] = {}

    def begin(self, unit: Unit) -> None:
        """The first gradients of a unit are about to be summed."""
        slot = self._slots[unit.index] if self._slots else None
        if slot is None:
            return
        holder = self._holder.get(slot, unit)
        if holder is unit or not holder.gradients.local:
            self._holder[slot] = unit
            return
        for group in unit.trainable:
            if group.sums is not None:
                self._beside[id(group)] = torch.empty_like(group.sums)

    def of(self, group: Group) -> torch.Tensor | None:
        """Where a group's gradients are summed; None where the plan has no slots for it."""
        return self._beside.get(id(group), group.sums)

    def clear(self) -> bool:
        """All gradients were dropped; returns whether memory beside the slots has become free."""
        beside = bool(self._beside)
        self._holder.clear()
        self._beside.clear()
        return beside
