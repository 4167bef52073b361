"""Slots: a unit's slot is fixed, neighbours never share one, and a large unit doesn't size them all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.plan.specs import relaxed
from zeroshard.sharding.slots import SlotLedger, SlotPlan, assign_slots

orders = st.lists(st.integers(0, 7), max_size=16)
sizes = st.lists(st.integers(1, 100), min_size=8, max_size=8)


def test_three_units_in_flight_need_three_slots() -> None:
    assert assign_slots(range(6), [10] * 6, distance=2).of_unit == (0, 1, 2, 0, 1, 2)


def test_without_prefetch_one_slot_serves_all() -> None:
    plan = assign_slots(range(6), [10, 20, 15, 10, 10, 10], distance=0)
    assert (plan.of_unit, plan.nbytes) == ((0,) * 6, (20,))


def test_an_outsized_unit_gets_a_slot_of_its_own() -> None:
    plan = assign_slots(range(6), [1000, 10, 10, 10, 10, 1000], distance=1)
    assert plan.total_nbytes == 1000 + 2 * 10
    assert plan.of_unit[0] == plan.of_unit[5]
    assert plan.of_unit[0] not in plan.of_unit[1:5]


def test_classes_are_kept_together_where_that_is_smaller() -> None:
    assert assign_slots(range(3), [10, 10, 16], distance=2).total_nbytes == 36


def test_dedicated_units_share_with_nobody() -> None:
    plan = assign_slots([0, 1, 2, 3], [5, 10, 10, 10], distance=0, dedicated=[0])
    assert plan.of_unit.count(plan.of_unit[0]) == 1


def test_units_outside_of_the_order_get_none() -> None:
    assert assign_slots([1], [10, 10, 10], distance=1).of_unit == (None, 0, None)


def test_nothing_to_gather_needs_nothing() -> None:
    assert assign_slots([], [10, 10], distance=1) == SlotPlan((), (None, None))


@relaxed
@given(orders, sizes, st.integers(0, 4))
def test_units_within_the_distance_never_share(order: list[int], nbytes: list[int], distance: int) -> None:
    plan = assign_slots(order, nbytes, distance=distance)
    shared = list(dict.fromkeys(order))
    for index, unit in enumerate(shared):
        for other in shared[index + 1 : index + 1 + distance]:
            assert plan.of_unit[unit] != plan.of_unit[other]


@relaxed
@given(orders, sizes, st.integers(0, 4))
def test_a_slot_is_as_large_as_its_largest_unit(order: list[int], nbytes: list[int], distance: int) -> None:
    plan = assign_slots(order, nbytes, distance=distance)
    for slot, capacity in enumerate(plan.nbytes):
        assert capacity == max(nbytes[unit] for unit in set(order) if plan.of_unit[unit] == slot)
    assert {unit for unit in range(8) if plan.of_unit[unit] is not None} == set(order)


@relaxed
@given(orders, sizes, st.integers(0, 4))
def test_slots_never_take_more_than_the_largest_units_in_flight(
    order: list[int], nbytes: list[int], distance: int
) -> None:
    needed = [nbytes[unit] for unit in dict.fromkeys(order)]
    plan = assign_slots(order, nbytes, distance=distance)
    assert plan.total_nbytes <= min(sum(needed), (distance + 1) * max(needed, default=0))


SHARED = SlotPlan((10,), (0, 0, None))


def test_the_ledger_knows_who_is_in_a_slot() -> None:
    ledger = SlotLedger(SHARED, stale=[], reuse=True)
    assert not ledger.holds(0)
    assert ledger.take(0) is None
    ledger.release(0)
    assert ledger.holds(0)
    assert ledger.take(1) == 0
    assert (ledger.holds(0), ledger.holds(1)) == (False, True)


def test_without_reuse_a_released_slot_is_empty() -> None:
    ledger = SlotLedger(SHARED, stale=[], reuse=False)
    ledger.take(0)
    assert ledger.holds(0)
    ledger.release(0)
    assert not ledger.holds(0)
    assert ledger.take(1) is None


def test_a_release_leaves_another_units_content_alone() -> None:
    ledger = SlotLedger(SHARED, stale=[], reuse=False)
    ledger.take(0)
    ledger.take(1)
    ledger.release(0)
    assert ledger.holds(1)


def test_a_step_empties_slots_and_makes_what_is_updated_in_parts_stale() -> None:
    ledger = SlotLedger(SHARED, stale=[2], reuse=True)
    ledger.take(0)
    assert ledger.holds(2)
    ledger.invalidate()
    assert not ledger.holds(0)
    assert not ledger.holds(2)
    assert ledger.take(2) is None
    assert ledger.holds(2)


def test_a_unit_updated_whole_is_always_current() -> None:
    ledger = SlotLedger(SHARED, stale=[], reuse=True)
    ledger.invalidate()
    assert ledger.holds(2)
