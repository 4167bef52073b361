"""Parameters that are gathered as 8-bit codes (qwZ): what ranks compute with, what is sent, and what stays exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, held_bytes, sent
from tests.support.models import Batch, Task, square_loss
from tests.support.training import adamw, build
from tests.support.zoo import Stack
from zeroshard.config import load_config
from zeroshard.engine.memory.block_codes import decode, encode
from zeroshard.errors import ConfigError, PlanError
from zeroshard.mesh import REPLICATE, Mesh
from zeroshard.plan.builder import Precision, Recipe, build_plan
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import STAGES, Blocks
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.plan.traffic import step_traffic
from zeroshard.sharding.units import find_units

TASK = Task(Stack, square_loss)
BLOCKS = Blocks(8, 64)


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """What values become on their way, as one record."""
    record = torch.zeros(BLOCKS.code_nbytes(values.numel()) + BLOCKS.scale_nbytes(values.numel()), dtype=torch.uint8)
    encode(values, record, BLOCKS)
    found = torch.empty_like(values)
    decode(record, 1, found, BLOCKS)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_code_is_within_half_a_step_of_its_value(dtype: torch.dtype) -> None:
    values = torch.randn(16, BLOCKS.size, generator=torch.Generator().manual_seed(0)).mul_(10).to(dtype)
    values[3] = 0
    found = _rounded(values.view(-1)).view(values.shape)
    step = values.float().abs().amax(dim=1, keepdim=True) / 127
    assert bool(((found.float() - values.float()).abs() <= step * 0.5 + step * 127 * torch.finfo(dtype).eps).all())
    assert bool((found[3] == 0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    values = torch.ones(2 * BLOCKS.size)
    values[5] = bad
    found = _rounded(values)
    assert not bool(found[5].isfinite())
    assert bool((found[BLOCKS.size :] == 1).all())


def _round_all(model: nn.Module, plan: Plan) -> None:
    """Give a plain model the values that ranks of the plan compute with in their first forward."""
    named = dict(model.named_parameters())
    for _, group in plan.groups():
        flat = torch.zeros(group.layout.numel)
        for segment in group.layout.segments:
            flat[segment.offset : segment.end] = named[segment.name].detach().reshape(-1)
        rounded = _rounded(flat) if group.codes is not None else flat
        with torch.no_grad():
            for segment in group.layout.segments:
                named[segment.name].copy_(rounded[segment.offset : segment.end].view(segment.shape))


def _recipe(mesh: Mesh, **changes: Any) -> Recipe:
    row = STAGES[3].with_second_copies(mesh) if mesh.size((REPLICATE,)) > 1 else STAGES[3]
    policy = ExecutionPolicy(accumulate=True, clip_norm=0.5)
    return Recipe(sharding=row, policy=policy, codes=BLOCKS, frozen_codes=BLOCKS, **changes)


def _steps(rank: int, world: int, subgroup: int, changes: dict[str, Any]) -> list[float]:
    mesh, model = Mesh.data_parallel(world, subgroup), build(TASK)
    recipe = _recipe(mesh, **changes)
    exact = {name: value.detach().clone() for name, value in model.named_parameters()}
    plain = build(TASK)
    _round_all(plain, build_plan(find_units(plain), recipe, mesh))
    expected = TASK.loss(plain, Batch(0, 0, rank)).detach()
    model, optimizer = zeroshard.shard(model, adamw(model), plan=recipe, mesh=mesh)
    for name, value in zeroshard.iterate_full_parameters(model):
        torch.testing.assert_close(value, exact[name], rtol=0, atol=0)  # the shards themselves are not rounded
    losses: list[float] = []
    for step in range(3):
        zeroshard.drain(model)
        forget_sent(model)
        for micro in range(2):
            loss = TASK.loss(model, Batch(step, micro, rank))
            losses.append(float(loss.detach()))
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == float(expected)
    plan = zeroshard.plan_of(model)
    assert sent(model) == step_traffic(plan, micro_batches=2)
    assert held_bytes(model).total == state_bytes(plan).total
    zeroshard.close(model)
    return losses


@pytest.mark.parametrize(
    ("world", "subgroup", "changes"),
    [(2, 2, {}), (4, 2, {}), (3, 3, {"offload": Offload(param=True)}), (4, 2, {"offload": Offload(param=True)})],
    ids=["one group", "second copies", "on the host", "second copies, on the host"],
)
def test_all_ranks_compute_with_the_decoded_values(world: int, subgroup: int, changes: dict[str, Any]) -> None:
    run_ranks(world, _steps, subgroup, changes)


def test_a_gather_sends_a_byte_for_each_parameter_and_the_scales() -> None:
    mesh = Mesh.data_parallel(8)
    recipe = Recipe(precision=Precision(param="bf16"), codes=Blocks(8, 256))
    plan = build_plan(find_units(build(TASK)), recipe, mesh)
    for unit, legs in zip(plan.units, plan.legs, strict=True):
        for group, lists in zip(unit.groups, legs, strict=True):
            (nbytes,) = (leg.nbytes for leg in lists.gather if leg.axes)
            assert nbytes == group.layout.numel + group.layout.numel // 256 * 4


CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


def _config(stage: int, key: str) -> dict[str, Any]:
    return {**CONFIG, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, key: True}}


def _from_config(rank: int, world: int) -> None:
    for key, trainable in (("zero_quantized_weights", True), ("zero_quantized_nontrainable_weights", False)):
        model = build(TASK)
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
        engine, *_ = zeroshard.initialize(model=model, config=_config(3, key))
        engine.backward(TASK.loss(engine, Batch(0, 0, rank)))
        engine.step()
        coded = {group.trainable for _, group in engine.plan.groups() if group.codes is not None}
        assert coded == ({True, False} if trainable else {False})
        engine.destroy()


def test_the_config_says_which_parameters_go_in_codes() -> None:
    run_ranks(2, _from_config)


def test_codes_below_stage_3_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="is for stage 3"):
        load_config(_config(2, "zero_quantized_weights"), world_size=2)


def test_codes_that_would_round_what_nobody_else_has_are_refused() -> None:
    model = build(TASK).double()
    with pytest.raises(PlanError, match="float64"):
        build_plan(find_units(model), Recipe(codes=BLOCKS), 2)
