"""The published numbers that are right come out of the plan; the ones that can't be are told so."""

from __future__ import annotations

import pytest
import torch

from zeroshard.plan.builder import Precision, Recipe, build_plan
from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.memory import StateBytes, state_bytes
from zeroshard.plan.offload import Offload as HostState
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.planner.choose.advice import impossible_memory, impossible_rate
from zeroshard.planner.machine.hardware import find_gpu
from zeroshard.planner.predict.cost import update_nbytes
from zeroshard.planner.predict.memory import tier_bytes
from zeroshard.planner.predict.rows import hours
from zeroshard.planner.predict.tiers import Offload
from zeroshard.sharding.units import ParameterSpec, UnitSpec

GB = 1e9
BF16_GRADIENTS = Precision("bfloat16", accumulate="bfloat16")


def _plan(
    parameters: float,
    stage: int,
    dp: int,
    precision: Precision = BF16_GRADIENTS,
    accumulate: bool = False,
    offload: HostState | None = None,
) -> Plan:
    """A model of that many parameters in 64 units; 2-byte gradients unless the precision says otherwise."""
    numel = int(parameters) // 64 // 1024
    units = [
        UnitSpec(f"block{i}" if i else "", (ParameterSpec(f"w{i}", (numel, 1024), torch.float32),)) for i in range(64)
    ]
    recipe = Recipe(STAGES[stage], {}, precision, ExecutionPolicy(accumulate=accumulate), offload=offload)
    return build_plan(units, recipe, dp)


def _on_host(parameters: float, *, param: bool) -> Plan:
    """Stage 3 on 8 GPUs with whole master weights and all state in host memory."""
    return _plan(parameters, 3, 8, offload=HostState(param=param))


def _state(plan: Plan) -> StateBytes:
    return state_bytes(plan)


def test_sixteen_bytes_a_parameter() -> None:
    plan = _plan(7e9, 0, 1)
    state = _state(plan)
    per = [n / plan.parameter_numel for n in (state.param, state.grad, state.master, state.moments)]
    assert per == pytest.approx([2, 2, 4, 8], abs=0.001)


@pytest.mark.parametrize(("stage", "expected"), [(0, 112.0), (1, 38.5), (2, 26.25), (3, 14.0)])
def test_seven_billion_on_eight_gpus(stage: int, expected: float) -> None:
    assert _state(_plan(7e9, stage, 8)).state / GB == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("stage", "expected"), [(0, 126.0), (1, 52.5), (2, 28.0), (3, 15.75)])
def test_the_same_with_gradients_accumulated_in_fp32(stage: int, expected: float) -> None:
    plan = _plan(7e9, stage, 8, Precision("bfloat16"), accumulate=True)
    assert _state(plan).state / GB == pytest.approx(expected, abs=0.01)
    assert itemsize("float32") == 4


def test_master_weights_and_moments_are_apart() -> None:
    state = _state(_plan(7e9, 0, 1))
    assert (state.master / GB, state.moments / GB) == pytest.approx((28, 56), abs=0.01)


@pytest.mark.parametrize(("stage", "factor"), [(1, 2.91), (2, 4.27), (3, 8.0)])
def test_reduction_on_eight_gpus_is_less_than_the_limit(stage: int, factor: float) -> None:
    assert _state(_plan(7e9, 0, 8)).state / _state(_plan(7e9, stage, 8)).state == pytest.approx(factor, abs=0.01)


def test_seventy_billion_without_zero() -> None:
    assert _state(_plan(70e9, 0, 1)).state / 1e12 == pytest.approx(1.12, abs=0.001)


def test_thirteen_billion_at_stage_2_is_too_much_for_40_gb() -> None:
    state = _state(_plan(13e9, 2, 8)).state
    assert state / GB == pytest.approx(48.75, abs=0.02)
    assert state > find_gpu("A100-40GB").memory


@pytest.mark.parametrize(
    ("parameters", "offload", "expected"),
    [(70e9, Offload.CPU, 840), (70e9, Offload.CPU_PARAM, 980), (175e9, Offload.CPU, 2100)],
)
def test_host_bytes_of_offload(parameters: float, offload: Offload, expected: float) -> None:
    host = dict(tier_bytes(_on_host(parameters, param=offload is Offload.CPU_PARAM)).host)
    gradients = host.pop("gradients")
    assert 8 * sum(host.values()) / GB == pytest.approx(expected, abs=0.5)
    assert 8 * gradients / GB == pytest.approx(2 * parameters / GB, abs=0.1)


def test_an_optimizer_step_on_the_host_moves_28_bytes_a_parameter() -> None:
    plan = _on_host(70e9, param=False)
    moved = 8 * sum(update_nbytes(group) for _, group in plan.groups())
    assert moved / 1e12 == pytest.approx(1.96, abs=0.01)


def test_175_billion_with_tensor_and_pipeline_parallelism_leaves_zero_nothing() -> None:
    # 64 GPUs as 8 x 8: each holds 1/64 of the model, and one data-parallel rank shares nothing.
    per_gpu = 175e9 / 64
    for stage in STAGES:
        assert _state(_plan(per_gpu, stage, 1)).state / GB == pytest.approx(43.75, abs=0.05)


@pytest.mark.parametrize(
    ("hour_count", "rate", "cost"), [(55, 24.80, 1364), (120, 28.40, 3408), (320, 26.20, 8384), (18, 99.20, 1786)]
)
def test_cost_is_hours_times_rate(hour_count: float, rate: float, cost: float) -> None:
    assert hour_count * rate == pytest.approx(cost, abs=0.5)
    tokens_per_second = 1e9 / (3600 * 8 * hour_count)
    assert hours(1e9, 8, tokens_per_second) == pytest.approx(hour_count)


@pytest.mark.parametrize(
    ("parameters", "gpu", "rate"),
    [
        (7e9, "A100", 8500),
        (13e9, "A100", 5200),
        (30e9, "A100", 2800),
        (70e9, "H100", 2200),
        (70e9, "H100", 2400),
        (175e9, "H100", 1400),
    ],
)
def test_published_rates_above_the_peak_are_called_impossible(parameters: float, gpu: str, rate: float) -> None:
    peak = find_gpu(gpu).bf16_flops
    reason = impossible_rate(parameters, rate, peak)
    assert reason is not None
    assert "peak" in reason
    assert impossible_rate(parameters, rate / 3, peak) is None


def test_published_memory_below_the_state_is_called_impossible() -> None:
    state = _state(_plan(70e9, 3, 8)).state
    assert state / GB == pytest.approx(140, abs=0.1)
    assert impossible_memory(state, 74e9) is not None
    for parameters, stage, dp, published in [
        (7e9, 2, 8, 32),
        (13e9, 2, 8, 58),
        (13e9, 2, 32, 36),
        (70e9, 3, 32, 48),
        (175e9, 3, 64, 70),
    ]:
        assert impossible_memory(_state(_plan(parameters, stage, dp)).state, published * GB) is None
