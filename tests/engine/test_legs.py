"""A plan's legs are what runs, what is counted and what is timed: whoever changes one leg changes all three."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

import zeroshard
from tests.plan.specs import blocks, plan_of
from tests.planner.settings import BF16
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, sent
from tests.support.models import Batch, Task, square_loss
from tests.support.training import adamw, build
from tests.support.zoo import Stack
from zeroshard.engine.core.handle import handle_of
from zeroshard.mesh import SHARD, Mesh
from zeroshard.plan.builder import Recipe, build_plan
from zeroshard.plan.legs import GroupLegs, Leg, LegKind, Legs
from zeroshard.plan.placement import STAGES, Sharding
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.plan.traffic import Traffic, step_traffic
from zeroshard.planner.machine.hardware import parse_cluster
from zeroshard.planner.predict.timeline import step_time
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.sources import sized_source
from zeroshard.planner.trace.workload import Workload
from zeroshard.sharding.units import find_units

TASK = Task(Stack, square_loss)
WORLD, STEPS = 4, 2
IN_SUBGROUPS = Sharding(param=True, grad=True, state=True, axes=(SHARD,))
LISTS = ("gather", "keep", "pending", "reduce", "late")
Change = Callable[[Leg], Leg | None]


def _with_legs(plan: Plan, change: Change) -> Plan:
    """The same plan, each of whose legs became `change` of it, or was dropped where that is None."""

    def changed(legs: Legs) -> Legs:
        return tuple(new for leg in legs if (new := change(leg)) is not None)

    def group(legs: GroupLegs) -> GroupLegs:
        return replace(legs, **{name: changed(getattr(legs, name)) for name in LISTS})

    other = replace(plan)
    other.__dict__["legs"] = tuple(tuple(map(group, unit)) for unit in plan.legs)
    return other


def _without(kind: LegKind, leg: Leg) -> Leg | None:
    return None if leg.kind is kind else leg


def _over_subgroups(kind: LegKind, leg: Leg) -> Leg:
    return replace(leg, axes=(SHARD,)) if leg.kind is kind else leg


def _plan(row: Sharding, subgroup: int, *, accumulate: bool) -> Plan:
    recipe = Recipe(sharding=row, policy=ExecutionPolicy(accumulate=accumulate))
    return build_plan(find_units(build(TASK)), recipe, Mesh.data_parallel(WORLD, subgroup))


def _trained(plan: Plan, rank: int, micro_batches: int) -> tuple[Traffic, dict[str, torch.Tensor]]:
    """What a steady step sends, and this rank's own parameters after some steps."""
    model = build(TASK)
    model, optimizer = zeroshard.shard(model, adamw(model), plan=plan, accumulate=None)
    assert optimizer is not None
    for step in range(STEPS):
        forget_sent(model)
        for micro in range(micro_batches):
            (TASK.loss(model, Batch(step, micro, rank)) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    traffic = sent(model)
    runtime = handle_of(model).runtime
    runtime.drain()
    held = {f"{unit.label} {n}": g.shard.clone() for unit in runtime.units for n, g in enumerate(unit.groups)}
    zeroshard.close(model)
    return traffic, held


MUTATIONS: dict[str, tuple[Sharding, int, int, Change]] = {
    "no all-reduce over the subgroups": (IN_SUBGROUPS, 2, 1, partial(_without, LegKind.ALL_REDUCE)),
    "no all-gather": (STAGES[3], 4, 1, partial(_without, LegKind.ALL_GATHER)),
    "an all-reduce over the other axis": (IN_SUBGROUPS, 1, 1, partial(_over_subgroups, LegKind.ALL_REDUCE)),
    "nothing lands": (STAGES[2], 4, 2, partial(_without, LegKind.LAND)),
}
"""A row, ranks of a subgroup, micro-batches, and what is done to each leg."""


def _mutated(rank: int, world: int, name: str) -> tuple[bool, bool, bool]:
    """Whether the step sends what the changed list says, what the true one says, and leaves the true parameters."""
    row, subgroup, micro_batches, change = MUTATIONS[name]
    plan = _plan(row, subgroup, accumulate=micro_batches > 1)
    _, expected = _trained(plan, rank, micro_batches)
    other = _with_legs(plan, change)
    traffic, found = _trained(other, rank, micro_batches)
    bits = all(torch.equal(found[key], expected[key]) for key in expected)
    count = partial(step_traffic, micro_batches=micro_batches)
    return traffic == count(other), traffic == count(plan), bits


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_leg_changes_what_is_sent_what_is_counted_and_the_bits(name: str) -> None:
    results = run_ranks(WORLD, _mutated, name)
    assert all(counted for counted, _, _ in results)
    sends = name != "nothing lands"
    assert all(same is not sends for _, same, _ in results)
    assert not all(bits for _, _, bits in results)


def _other_dtype(kind: LegKind, leg: Leg) -> Leg:
    return replace(leg, dtype="bfloat16") if leg.kind is kind else leg


def _half_as_much(kind: LegKind, leg: Leg) -> Leg:
    return replace(leg, numel=leg.numel // 2) if leg.kind is kind else leg


def _refuses(rank: int, world: int) -> None:
    plan = _plan(STAGES[3], WORLD, accumulate=False)
    for kind in (LegKind.COLLECT, LegKind.REDUCE_SCATTER, LegKind.ALL_GATHER):
        for change in (_other_dtype, _half_as_much):
            with pytest.raises(AssertionError, match=kind.name):
                _trained(_with_legs(plan, partial(change, kind)), rank, 1)


def test_legs_that_say_another_dtype_or_size_than_the_memory_has_do_not_run() -> None:
    run_ranks(WORLD, _refuses)


def _kinds(plan: Plan) -> Iterator[LegKind]:
    for unit in plan.legs:
        for group in unit:
            yield from {leg.kind for legs in (group.gather, group.reduce) for leg in legs if leg.axes}


@pytest.mark.parametrize("row", [STAGES[0], STAGES[3], IN_SUBGROUPS], ids=["0", "3", "subgroups"])
def test_the_planners_clocks_read_the_same_list(row: Sharding) -> None:
    cluster = parse_cluster("8xH100")
    plan, traced = Workload(sized_source(1e8, 2, 256), 1, 128).plan(
        replace(BF16, sharding=row), Mesh.data_parallel(8, 4), Checkpointing.OFF
    )
    busy = step_time(plan, traced, cluster).busy
    for kind in set(_kinds(plan)):
        less = step_time(_with_legs(plan, partial(_without, kind)), traced, cluster).busy
        assert less["gather"] + less["reduce"] < busy["gather"] + busy["reduce"], kind
        moved = _with_legs(plan, partial(_over_subgroups, kind))
        assert moved.legs == plan.legs or step_time(moved, traced, cluster).busy != busy, kind


@pytest.mark.parametrize("stage", range(4))
def test_a_plan_has_one_list_and_every_reduce_ends_where_gradients_rest(stage: int) -> None:
    plan = plan_of(blocks(2), stage, dp=4)
    assert plan.legs is plan.legs
    for unit in plan.legs:
        for group in unit:
            assert group.reduce[-1].target.value in ("grad", "local")
            assert group.reduce[-1].target == group.pending[-1].target
