"""Slots: the few buffers for gathered units (or for gradients that are about to be sent), and which unit is in which.

A unit always uses the same slot, in forward and backward. Autograd saves views of weights (`nn.Linear` saves `w.t()`);
they stay valid because the unit is always gathered to the same address. Units that are within the prefetch distance of
each other never share a slot.

Rejected: allocating per gather. The caching allocator would give another address in the backward, and saved views
would read another unit's weights without any version error.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from zeroshard.field_types import check_fields

OUTSIZED = 1.5
"""A unit larger than this many medians may get a slot of its own, so that one large embedding doesn't enlarge all."""


@dataclass(frozen=True)
class SlotPlan:
    """Capacity in bytes of each slot, and the slot of each unit (None: the unit needs none)."""

    nbytes: tuple[int, ...]
    of_unit: tuple[int | None, ...]

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def total_nbytes(self) -> int:
        return sum(self.nbytes)


NO_SLOTS = SlotPlan((), ())


def assign_slots(
    order: Sequence[int], nbytes: Sequence[int], *, distance: int, dedicated: Sequence[int] = ()
) -> SlotPlan:
    """Assign slots to the units in `order` (repeats allowed), units up to `distance` apart getting different ones.

    Args:
        order: units in execution order; a unit that is not in it gets no slot.
        nbytes: bytes that each unit needs.
        distance: how many units ahead a gather may be.
        dedicated: units that share their slot with no other unit (the root: it is in use all the time).
    """
    shared = [unit for unit in dict.fromkeys(order) if unit not in set(dedicated)]
    sizes = [nbytes[unit] for unit in shared]
    candidates = [[shared]]
    if sizes:
        limit = OUTSIZED * statistics.median(sizes)
        big = [unit for unit in shared if nbytes[unit] > limit]
        candidates.append([[unit for unit in shared if nbytes[unit] <= limit], big])
    plans = [_assign_classes(classes, shared, nbytes, distance, dedicated) for classes in candidates]
    return min(plans, key=lambda plan: plan.total_nbytes)


def _assign_classes(
    classes: Sequence[Sequence[int]],
    shared: Sequence[int],
    nbytes: Sequence[int],
    distance: int,
    dedicated: Sequence[int],
) -> SlotPlan:
    position = {unit: index for index, unit in enumerate(shared)}
    of_unit: list[int | None] = [None] * len(nbytes)
    capacity: list[int] = []
    for members in classes:
        last_used: dict[int, int] = {}
        for unit in members:
            free = [slot for slot, last in last_used.items() if position[unit] - last > distance]
            slot = min(free, key=lambda candidate: last_used[candidate]) if free else len(capacity)
            if slot == len(capacity):
                capacity.append(0)
            capacity[slot] = max(capacity[slot], nbytes[unit])
            last_used[slot] = position[unit]
            of_unit[unit] = slot
    for unit in dedicated:
        of_unit[unit] = len(capacity)
        capacity.append(nbytes[unit])
    return SlotPlan(tuple(capacity), tuple(of_unit))


class Outdated(Enum):
    """Which groups of a unit's second copy (plan.groups.SecondCopy) have to be updated before it is read."""

    NOTHING = 0
    TRAINABLE = 1
    """The trainable groups: a step has updated their parameters."""
    ALL = 2

    def covers(self, trainable: bool) -> bool:
        """Whether a group, trainable or not, has to be updated."""
        return self is Outdated.ALL or (self is Outdated.TRAINABLE and trainable)


class SlotLedger:
    """Which units' gathered parameters are up to date, and in which slots; the engine and the traffic count share it.

    Args:
        plan: the gather slots; a unit without a slot rests whole in a buffer of its own.
        stale: the units without a slot whose buffer is out of date after a step (each rank updated only its shard).
        reuse: whether a unit may use the content of its released slot again if no other unit was gathered there.
        second: the units whose parameters have a second copy.
    """

    def __init__(self, plan: SlotPlan, *, stale: Iterable[int], reuse: bool, second: Iterable[int] = ()) -> None:
        self._slot = plan.of_unit
        self._holder: list[int | None] = [None] * len(plan.nbytes)
        self._stale_after_step = frozenset(stale)
        self._stale: set[int] = set()
        self._reuse = reuse
        self._outdated = dict.fromkeys(second, Outdated.ALL)

    def state(self) -> Hashable:
        """Which unit is in which slot, and which buffers and second copies are out of date."""
        return tuple(self._holder), frozenset(self._stale), tuple(self._outdated.values())

    def take_outdated(self, unit: int) -> Outdated:
        """Which groups of the unit's second copy have to be updated; afterwards it counts as up to date."""
        found = self._outdated.get(unit, Outdated.NOTHING)
        if found is not Outdated.NOTHING:
            self._outdated[unit] = Outdated.NOTHING
        return found

    def holds(self, unit: int) -> bool:
        """Whether the unit's whole parameters are gathered, or being gathered."""
        slot = self._slot[unit]
        return unit not in self._stale if slot is None else self._holder[slot] == unit

    def take(self, unit: int) -> int | None:
        """The unit is about to be gathered; returns the unit whose values that overwrites, None if there is none."""
        slot = self._slot[unit]
        if slot is None:
            self._stale.discard(unit)
            return None
        previous, self._holder[slot] = self._holder[slot], unit
        return previous if previous != unit else None

    def gather_failed(self, unit: int) -> None:
        """The gather of a unit has failed after `take`: its whole parameters are not there."""
        self.copy_outdated(unit)
        slot = self._slot[unit]
        if slot is None:
            self._stale.add(unit)
        elif self._holder[slot] == unit:
            self._holder[slot] = None

    def copy_outdated(self, unit: int) -> None:
        """The update of the unit's second copy has failed: any part of it may be out of date."""
        if unit in self._outdated:
            self._outdated[unit] = Outdated.ALL

    def release(self, unit: int) -> None:
        """The unit is no longer in use; the content of its slot stays valid if the plan reuses slots."""
        slot = self._slot[unit]
        if slot is not None and not self._reuse and self._holder[slot] == unit:
            self._holder[slot] = None

    def invalidate(self, in_parts: Iterable[int] | None = None, *, stepped: bool = True) -> None:
        """The parameters have changed: no slot is up to date, nor are buffers of which each rank wrote only its shard.

        Args:
            in_parts: units without a slot of which each rank wrote only its shard; None for those that a step updates.
            stepped: with `in_parts` None, whether a step wrote them, which changes only trainable parameters.
        """
        self._holder = [None] * len(self._holder)
        for unit, outdated in self._outdated.items():
            by_step = stepped and in_parts is None and outdated is not Outdated.ALL
            self._outdated[unit] = Outdated.TRAINABLE if by_step else Outdated.ALL
        self._stale.update(self._stale_after_step if in_parts is None else in_parts)
