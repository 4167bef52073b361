"""The operation lists: each unit is used once per call, its slot is its own meanwhile, prefetch is bounded."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.specs import blocks, plan_of, relaxed
from zeroshard.plan.builder import reordered
from zeroshard.plan.plan import Plan
from zeroshard.plan.program import Op, OpKind, Program, Programs, build_programs
from zeroshard.plan.traffic import new_ledger

GATHER, USE, RELEASE, REDUCE = OpKind.GATHER, OpKind.USE, OpKind.RELEASE, OpKind.REDUCE
UNITS = 6
plans = st.builds(
    lambda stage, prefetch, reuse, root, order, threshold: reordered(
        plan_of(blocks(UNITS, 512, root=root), stage, dp=2, prefetch=prefetch, reuse=reuse, threshold=threshold),
        (0, *order),
    ),
    st.integers(0, 3),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from([0, 64]),
    st.lists(st.integers(1, UNITS), max_size=10),
    st.sampled_from([0, 64, 512]),
)


def text(program: Program) -> str:
    return " ".join(f"{op.kind.value[:3]}{op.unit}" for op in program)


def all_lists(programs: Programs) -> list[Program]:
    return [programs.forward, programs.backward, programs.after_step]


def test_the_lists_of_a_small_plan() -> None:
    programs = build_programs(plan_of(blocks(3), 3, prefetch=1))
    assert text(programs.forward) == "gat0 use0 gat1 gat2 use1 rel1 gat3 use2 rel2 use3 rel3"
    assert text(programs.backward) == (
        "gat0 use0 gat3 gat2 use3 red3 rel3 gat1 use2 red2 rel2 use1 red1 rel1 red0 rel0"
    )
    assert text(programs.after_step) == "gat0 gat1 gat2"


def test_after_a_step_what_is_updated_in_parts_is_gathered_first() -> None:
    programs = build_programs(plan_of(blocks(3), 1))
    assert text(programs.after_step) == "gat1 gat2 gat3 gat0"


@relaxed
@given(plans)
def test_every_call_is_a_use_and_calls_in_a_row_share_a_release(plan: Plan) -> None:
    calls = [unit for unit in plan.order if plan.units[unit].name]
    programs = build_programs(plan)
    for program, expected in ((programs.forward, calls), (programs.backward, calls[::-1])):
        assert [op.unit for op in program if op.kind is USE and op.unit] == expected
        assert [op.unit for op in program if op.kind is RELEASE and op.unit] == [u for u, _ in groupby(expected)]


@relaxed
@given(plans)
def test_the_root_is_used_first_and_released_last(plan: Plan) -> None:
    programs = build_programs(plan)
    assert programs.forward[:2] == programs.backward[:2] == (Op(GATHER, 0), Op(USE, 0))
    assert programs.backward[-2:] == (Op(REDUCE, 0), Op(RELEASE, 0))
    assert Op(RELEASE, 0) not in programs.forward


@relaxed
@given(plans)
def test_each_unit_is_reduced_once_in_the_backward_after_its_last_use_and_never_elsewhere(plan: Plan) -> None:
    programs = build_programs(plan)
    assert Counter(op.unit for op in programs.backward if op.kind is REDUCE) == dict.fromkeys(range(UNITS + 1), 1)
    for unit in range(1, UNITS + 1):
        ops = [op for op in programs.backward if op.unit == unit]
        assert [op.kind for op in ops[-3:]] == [USE, REDUCE, RELEASE], text(programs.backward)
    assert not [op for op in (*programs.forward, *programs.after_step) if op.kind is REDUCE]


@relaxed
@given(plans)
def test_a_slot_is_never_taken_while_its_unit_is_live(plan: Plan) -> None:
    """Live: from its use to its release; what lies gathered ahead of its use must not be lost either."""
    slots = plan.gather_slots.of_unit
    programs = build_programs(plan)
    for program in (programs.forward, programs.backward):
        holder: dict[int, int] = {}
        for op in program:
            slot = slots[op.unit]
            if slot is None:
                continue
            if op.kind is GATHER:
                assert holder.get(slot, op.unit) == op.unit, (text(program), op)
                holder[slot] = op.unit
            elif op.kind is USE:
                assert holder.get(slot) == op.unit, (text(program), op)
            elif op.kind is RELEASE and op.unit:
                holder.pop(slot)


@relaxed
@given(plans)
def test_whatever_is_used_has_been_gathered_by_the_lists_alone(plan: Plan) -> None:
    """A use that has to gather for itself would be synchronous, and the traffic count would not know of it."""
    programs = build_programs(plan)
    ledger = new_ledger(plan)
    for program in (programs.forward, programs.backward, programs.after_step, programs.forward, programs.backward):
        if program is programs.after_step:
            ledger.invalidate()
        for op in program:
            if op.kind is GATHER and not ledger.holds(op.unit):
                ledger.take(op.unit)
            elif op.kind is USE:
                assert ledger.holds(op.unit), (text(program), op)
            elif op.kind is RELEASE:
                ledger.release(op.unit)


@relaxed
@given(plans)
def test_no_more_units_are_in_flight_than_prefetch_allows(plan: Plan) -> None:
    programs = build_programs(plan)
    for program in (programs.forward, programs.backward):
        waiting: list[int] = []
        for op in program:
            if plan.units[op.unit].name == "":
                continue
            if op.kind is GATHER:
                waiting.append(op.unit)
            elif op.kind is USE and op.unit in waiting:
                waiting.remove(op.unit)
            assert len(waiting) <= plan.policy.prefetch + 1, text(program)


@relaxed
@given(plans)
def test_after_a_step_no_more_is_gathered_than_the_next_forward_gathers_first(plan: Plan) -> None:
    programs = build_programs(plan)
    stale = {index for index, unit in enumerate(plan.units) if not unit.sharded and unit.stepped_in_shards}
    ahead = [op.unit for op in programs.after_step if op.unit not in stale]
    gathers = [op.unit for op in programs.forward if op.kind is GATHER and op.unit not in stale]
    assert stale <= {op.unit for op in programs.after_step}
    assert ahead == gathers[: len(ahead)]
    assert len([unit for unit in ahead if unit]) <= plan.policy.prefetch + 1


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 4])
def test_as_many_units_are_gathered_ahead_as_the_plan_says(prefetch: int) -> None:
    programs = build_programs(plan_of(blocks(8), 3, prefetch=prefetch))
    before_first_use = programs.forward[: programs.forward.index(Op(USE, 1))]
    assert len([op for op in before_first_use if op.kind is GATHER and op.unit]) == prefetch + 1


def test_a_block_called_again_is_used_again() -> None:
    plan = reordered(plan_of(blocks(3), 3, prefetch=1), (0, 1, 2, 1, 3, 3))
    assert text(tuple(op for op in build_programs(plan).forward if op.kind is USE)) == "use0 use1 use2 use1 use3 use3"


def test_a_unit_that_the_first_step_did_not_see_stays_in_the_lists() -> None:
    """Another rank, or a later step, may use it; and its gradients are reduced on every rank."""
    plan = reordered(plan_of(blocks(3), 3), (0, 3, 1))
    assert plan.order == (0, 3, 1, 2)
