"""Traffic per step from the plan, in payload bytes: an all-gather's output, a reduce-scatter's input.

Data parallel's all-reduce of the gradients counts as one reduce-scatter plus one all-gather: twice the parameters
(Rajbhandari et al. 2020, arXiv:1910.02054, section 7). The few float64 values of each step are apart, as 'all-reduce'.
"""

from __future__ import annotations

import pytest
import torch

from tests.plan.specs import blocks, plan_of
from zeroshard.errors import PlanError
from zeroshard.plan.builder import Precision
from zeroshard.plan.placement import Sharding
from zeroshard.plan.traffic import STATS_FIXED, Traffic, step_traffic

UNITS, NUMEL = 8, 1024
PSI = UNITS * NUMEL * 4
"""Bytes of all parameters in fp32; no padding."""


def payload(traffic: Traffic) -> int:
    return traffic.nbytes.get("all-gather", 0) + traffic.nbytes.get("reduce-scatter", 0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_0_to_2_send_what_data_parallel_sends(stage: int) -> None:
    traffic = step_traffic(plan_of(blocks(UNITS, NUMEL), stage))
    assert traffic.nbytes["all-gather"] == traffic.nbytes["reduce-scatter"] == PSI
    assert traffic.calls["all-gather"] == traffic.calls["reduce-scatter"] == UNITS


def test_stage_3_without_reuse_sends_half_as_much_again() -> None:
    traffic = step_traffic(plan_of(blocks(UNITS, NUMEL), 3, reuse=False))
    assert payload(traffic) == 3 * PSI
    assert traffic.nbytes["all-gather"] == 2 * PSI


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_reuse_saves_one_gather_per_slot(prefetch: int) -> None:
    traffic = step_traffic(plan_of(blocks(UNITS, NUMEL), 3, prefetch=prefetch))
    assert payload(traffic) == 3 * PSI - (prefetch + 1) * NUMEL * 4


@pytest.mark.parametrize("kept", range(UNITS - 1))
def test_spare_memory_saves_one_gather_per_unit_that_it_holds(kept: int) -> None:
    smallest, plan = (plan_of(blocks(UNITS, NUMEL), 3, spare=units * NUMEL * 4) for units in (0, kept))
    assert payload(step_traffic(smallest)) - payload(step_traffic(plan)) == kept * NUMEL * 4
    assert plan.gather_slots.total_nbytes - smallest.gather_slots.total_nbytes == kept * NUMEL * 4


def test_with_memory_for_all_units_stage_3_sends_what_stage_2_sends() -> None:
    assert payload(step_traffic(plan_of(blocks(UNITS, NUMEL), 3, spare=2**40))) == 2 * PSI


def test_spare_memory_holds_nothing_without_reuse() -> None:
    with pytest.raises(PlanError, match="spare_nbytes"):
        plan_of(blocks(UNITS, NUMEL), 3, spare=1, reuse=False)


def test_the_root_is_gathered_once_for_both_passes() -> None:
    with_root = step_traffic(plan_of(blocks(UNITS, NUMEL, root=NUMEL), 3, reuse=False))
    without = step_traffic(plan_of(blocks(UNITS, NUMEL), 3, reuse=False))
    assert payload(with_root) - payload(without) == 2 * NUMEL * 4


def test_persistent_units_are_gathered_once_after_the_step() -> None:
    assert payload(step_traffic(plan_of(blocks(UNITS, NUMEL), 3, threshold=NUMEL, reuse=False))) == 2 * PSI


@pytest.mark.parametrize(
    ("stage", "gathered", "reduced"), [(0, 1, 1), (1, 1, 1), (2, 1, 3), (3, 6, 3)], ids=lambda value: str(value)
)
def test_accumulation_repeats_what_is_sharded(stage: int, gathered: int, reduced: int) -> None:
    plan = plan_of(blocks(UNITS, NUMEL), stage, reuse=False, accumulate=True)
    traffic = step_traffic(plan, micro_batches=3)
    assert traffic.nbytes["all-gather"] == gathered * PSI
    assert traffic.nbytes["reduce-scatter"] == reduced * PSI


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync_reduces_once(stage: int) -> None:
    plan = plan_of(blocks(UNITS, NUMEL), stage, accumulate=True)
    assert step_traffic(plan, micro_batches=3, no_sync=True).nbytes["reduce-scatter"] == PSI


def test_a_subgroup_adds_an_all_reduce_of_the_shard_over_its_replicas() -> None:
    row = Sharding(param=True, grad=True, state=True, axes=("dp_shard",))
    traffic = step_traffic(plan_of(blocks(UNITS, NUMEL), row, dp=8, shard=4, reuse=False))
    assert payload(traffic) == 3 * PSI
    statistics = 8 * (STATS_FIXED + UNITS)
    assert traffic.nbytes["all-reduce"] == PSI // 4 + statistics
    assert traffic.calls["all-reduce"] == UNITS + 1


def test_a_subgroup_of_one_sends_gradients_only() -> None:
    row = Sharding(param=True, grad=True, state=True, axes=("dp_shard",))
    traffic = step_traffic(plan_of(blocks(UNITS, NUMEL), row, dp=2, shard=1))
    assert traffic.nbytes == {"all-reduce": PSI + 8 * (STATS_FIXED + UNITS)}


def test_one_rank_sends_nothing() -> None:
    assert step_traffic(plan_of(blocks(UNITS, NUMEL), 3, dp=1)).total == 0


def test_traffic_is_in_compute_dtype_and_wire_dtype() -> None:
    units = blocks(UNITS, NUMEL, dtype=torch.bfloat16)
    half = step_traffic(plan_of(units, 3, reuse=False))
    assert (half.nbytes["all-gather"], half.nbytes["reduce-scatter"]) == (PSI, PSI // 2)
    wide = step_traffic(plan_of(units, 3, reuse=False, precision=Precision(wire="float32")))
    assert (wide.nbytes["all-gather"], wide.nbytes["reduce-scatter"]) == (PSI, PSI)


def test_frozen_units_are_gathered_only_where_they_are_sharded() -> None:
    units = blocks(UNITS, NUMEL, trainable=False)
    assert payload(step_traffic(plan_of(units, 2))) == 0
    assert step_traffic(plan_of(units, 3, reuse=False)).nbytes["all-gather"] == 2 * PSI
    assert "reduce-scatter" not in step_traffic(plan_of(units, 3)).nbytes
