"""Bytes per rank from the plan: the published numbers of ZeRO's stages come out of it, and each kind stands apart.

GB is 1e9 bytes. Gradients of two bytes are those of a single micro-batch; with several they are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.plan.specs import blocks, plan_of
from zeroshard.plan.builder import Precision
from zeroshard.plan.memory import StateBytes, state_bytes
from zeroshard.plan.placement import Sharding
from zeroshard.plan.report import data_parallel_bytes, human_bytes

GB = 1e9
BF16 = Precision(param="bfloat16")


def state_of(billions: int, stage: int, *, dp: int = 8, accumulate: bool = False) -> StateBytes:
    """State of a bf16 model with Adam, in units of a hundred million parameters."""
    units = blocks(10 * billions, 100_000_000)
    return state_bytes(plan_of(units, stage, dp=dp, precision=BF16, accumulate=accumulate))


@pytest.mark.parametrize(("stage", "expected"), [(0, 112), (1, 38.5), (2, 26.25), (3, 14)])
def test_7b_on_8_ranks_with_gradients_of_two_bytes(stage: int, expected: float) -> None:
    assert state_of(7, stage).state / GB == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("stage", "expected"), [(0, 126), (1, 52.5), (2, 28), (3, 15.75)])
def test_7b_on_8_ranks_with_gradients_summed_in_fp32(stage: int, expected: float) -> None:
    assert state_of(7, stage, accumulate=True).state / GB == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("dp", [1, 8, 64])
def test_70b_held_whole_takes_1120_gb_on_any_number_of_ranks(dp: int) -> None:
    assert state_of(70, 0, dp=dp).state / GB == pytest.approx(1120, rel=1e-4)


def test_13b_at_stage_2_does_not_fit_8_ranks_of_40_gb() -> None:
    assert state_of(13, 2).state / GB == pytest.approx(48.75, abs=0.01)


def test_master_weights_and_moments_are_told_apart() -> None:
    whole = state_of(7, 0)
    assert (whole.master / GB, whole.moments / GB) == (pytest.approx(28, abs=0.01), pytest.approx(56, abs=0.01))
    assert (whole.param / GB, whole.grad / GB) == (pytest.approx(14, abs=0.01), pytest.approx(14, abs=0.01))


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 1000])
@pytest.mark.parametrize(
    ("stage", "per_parameter"),
    [(0, lambda n: 16), (1, lambda n: 4 + 12 / n), (2, lambda n: 2 + 14 / n), (3, lambda n: 16 / n)],
)
def test_the_papers_formulas_hold_at_any_number_of_ranks(
    stage: int, per_parameter: Callable[[int], float], ranks: int
) -> None:
    assert state_of(7, stage, dp=ranks).state == pytest.approx(7e9 * per_parameter(ranks), rel=1e-3)


def test_padding_is_counted() -> None:
    plan = plan_of(blocks(1, 65), 0)
    assert state_bytes(plan).param == 128 * 4
    assert data_parallel_bytes(plan).param == 65 * 4


def test_fp32_parameters_are_their_own_master() -> None:
    state = state_bytes(plan_of(blocks(2), 0))
    assert (state.param, state.grad, state.master, state.moments) == (8192, 8192, 0, 16384)


@pytest.mark.parametrize(("moments", "nbytes"), [(0, 0), (1, 8192), (2, 16384)])
def test_moments_follow_the_optimizer(moments: int, nbytes: int) -> None:
    assert state_bytes(plan_of(blocks(2), 0, moments=moments)).moments == nbytes


def test_frozen_parameters_have_no_other_state() -> None:
    state = state_bytes(plan_of(blocks(2, dtype=torch.bfloat16, trainable=False), 3, dp=2))
    assert (state.param, state.grad, state.master, state.moments, state.reduce_slots) == (2048, 0, 0, 0, 0)


def test_slots_are_beside_the_state() -> None:
    state = state_bytes(plan_of(blocks(6), 3, dp=2, prefetch=1))
    assert (state.gather_slots, state.reduce_slots) == (2 * 4096, 2 * 4096)
    assert state.total == state.state + state.gather_slots + state.reduce_slots + state.at_rest
    assert state.at_rest == 4  # one element of float32


def test_a_reduce_that_is_added_or_cast_lands_beside_the_slot() -> None:
    plan = plan_of(blocks(6), 3, dp=2, accumulate=True)
    assert state_bytes(plan).reduce_slots == 2 * (4096 + 2048)


def test_whole_gradients_in_wire_dtype_need_no_slot() -> None:
    assert state_bytes(plan_of(blocks(6), 1, dp=2)).reduce_slots == 0


def test_no_sync_adds_whole_gradients_where_they_are_sharded_and_only_there() -> None:
    assert [state_bytes(plan_of(blocks(6), stage, dp=2)).no_sync for stage in range(4)] == [0, 0, 6 * 4096, 6 * 4096]


def test_a_persistent_unit_keeps_its_parameters_whole() -> None:
    plan = plan_of(blocks(6), 3, dp=2, threshold=1024)
    assert state_bytes(plan).param == 6 * 4096
    assert state_bytes(plan).grad == 3 * 4096
    assert state_bytes(plan).gather_slots == 0


def test_a_subgroup_divides_by_its_own_size() -> None:
    row = Sharding(param=True, grad=True, state=True, axes=("dp_shard",))
    assert state_bytes(plan_of(blocks(6), row, dp=8, shard=2)).param == 3 * 4096


def test_a_subgroup_of_one_holds_everything_in_place() -> None:
    row = Sharding(param=True, grad=True, state=True, axes=("dp_shard",))
    state = state_bytes(plan_of(blocks(6), row, dp=2, shard=1))
    assert (state.param, state.gather_slots, state.reduce_slots) == (6 * 4096, 0, 0)


def test_one_rank_needs_no_slots() -> None:
    state = state_bytes(plan_of(blocks(6), 3, dp=1))
    assert (state.gather_slots, state.reduce_slots) == (0, 0)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (14e9, "14 GB"), (1.12e12, "1.12 TB")]
)
def test_bytes_are_read_in_decimal_units(nbytes: int, text: str) -> None:
    assert human_bytes(int(nbytes)) == text
