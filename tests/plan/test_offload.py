"""What of a plan rests in host memory, and what it costs: by ratio, by who updates, by dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.specs import blocks
from zeroshard.errors import PlanError
from zeroshard.plan.builder import Precision, Recipe, build_plan
from zeroshard.plan.check import peer_problem
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import STREAM_BUFFERS, LinkTraffic, Offload, link_traffic
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy, HostUpdate

NUMEL = 1 << 20
UNITS = 8
ALL = NUMEL * UNITS
RANKS = 4


def plan_with(offload: Offload, *, stage: int = 3, accumulate: bool = False, master: str | None = None) -> Plan:
    recipe = Recipe(
        sharding=STAGES[stage],
        precision=Precision(param="bfloat16", master=master),
        policy=ExecutionPolicy(accumulate=accumulate),
        offload=offload,
    )
    return build_plan(blocks(UNITS, NUMEL), recipe, RANKS)


@pytest.mark.parametrize(("ratio", "units"), [(0.0, 0), (0.1, 1), (0.5, 4), (0.51, 5), (1.0, 8)])
def test_the_last_units_move_until_the_ratio_is_reached(ratio: float, units: int) -> None:
    plan = plan_with(Offload(ratio))
    moved = [index for index, unit in enumerate(plan.units) if any(group.updated_off_device for group in unit.groups)]
    assert moved == list(range(len(plan.units)))[len(plan.units) - units :]


@pytest.mark.parametrize(
    ("offload", "accumulate", "master", "host"),
    [
        (Offload(), False, None, 4 + 8 + 2),
        (Offload(param=True), False, None, 4 + 8 + 2 + 2),
        (Offload(), True, None, 4 + 8 + 4 + 2),
        (Offload(update=HostUpdate.STREAMED), False, None, 4 + 8 + 2),
        (Offload(update=HostUpdate.STREAMED), False, "int16", 2 + 8 + 2),
        (Offload(update=HostUpdate.STREAMED), True, None, 4 + 8),
        (Offload(update=HostUpdate.STREAMED, param=True), False, None, 4 + 8 + 2 + 2),
    ],
)
def test_host_bytes_per_parameter(offload: Offload, accumulate: bool, master: str | None, host: int) -> None:
    state = state_bytes(plan_with(offload, accumulate=accumulate, master=master))
    assert state.host == ALL * host // RANKS
    assert state.param == (0 if offload.param else ALL * 2 // RANKS)
    assert (state.master, state.moments) == (0, 0)
    assert state.grad == (ALL * 4 // RANKS if accumulate else 0)


@pytest.mark.parametrize(
    ("offload", "stage", "accumulate", "master", "down", "up"),
    [
        (Offload(), 3, False, None, 2, 2),
        (Offload(), 3, True, None, 4, 2),
        (Offload(), 1, False, None, 2, 2),
        (Offload(update=HostUpdate.STREAMED), 3, False, None, 14, 14),
        (Offload(update=HostUpdate.STREAMED), 3, False, "int16", 12, 12),
        (Offload(update=HostUpdate.STREAMED), 2, True, None, 12, 12),
        (Offload(update=HostUpdate.STREAMED, param=True), 3, False, None, 16, 16),
    ],
)
def test_bytes_over_the_link_per_parameter(
    offload: Offload, stage: int, accumulate: bool, master: str | None, down: int, up: int
) -> None:
    plan = plan_with(offload, stage=stage, accumulate=accumulate, master=master)
    assert link_traffic(plan) == LinkTraffic(ALL * down // RANKS, ALL * up // RANKS)


def test_streamed_state_passes_through_three_buffers_of_a_piece() -> None:
    offload = Offload(update=HostUpdate.STREAMED, stream_numel=4096)
    assert state_bytes(plan_with(offload)).state_buffers == STREAM_BUFFERS * 4096 * 14
    assert (
        state_bytes(plan_with(replace(offload, stream_numel=ALL))).state_buffers == STREAM_BUFFERS * 14 * NUMEL // RANKS
    )
    assert state_bytes(plan_with(Offload())).state_buffers == 0


def test_one_rank_alone_offloads_as_many_do() -> None:
    recipe = Recipe(precision=Precision(param="bfloat16"), offload=Offload(param=True))
    state = state_bytes(build_plan(blocks(UNITS, NUMEL), recipe, 1))
    assert (state.param, state.grad, state.host) == (0, 0, ALL * 16)


def test_parameters_on_the_host_are_not_copied_between_peers() -> None:
    assert peer_problem(plan_with(Offload(param=True))) == "parameters rest off the device"
    assert peer_problem(plan_with(Offload())) is None


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(PlanError, match="ratio"):
        Offload(0.5, param=True)
    with pytest.raises(PlanError, match="stream_numel"):
        Offload(stream_numel=0)
    with pytest.raises(PlanError, match="float32 master weights, not int16"):
        plan_with(Offload(), master="int16")
    recipe = Recipe(matrices=("block7.weight",), offload=Offload())
    with pytest.raises(PlanError, match="whole matrices"):
        build_plan(blocks(UNITS, NUMEL), recipe, RANKS)
