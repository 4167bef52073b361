"""Weights that rest and travel in fp8: what ranks compute with, what they hold and send, and what stays exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.fp8_model import (
    BY_BLOCK,
    FP8,
    LAYERS,
    adamw,
    batch,
    build,
    codes_are_those_of_whole_weights,
    loss_of,
    recipe,
    train,
    train_alone,
)
from tests.support.measure import forget_sent, held_bytes, sent
from zeroshard.errors import PlanError, UsageError
from zeroshard.fp8.recipe import Fp8, Products, Scaling
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.plan import Plan
from zeroshard.plan.products import with_products
from zeroshard.plan.traffic import step_traffic
from zeroshard.sharding.units import find_units

Weights = dict[str, torch.Tensor]


KINDS = pytest.mark.parametrize("fp8", [FP8, BY_BLOCK], ids=["by tensor", "by block"])


def _one(rank: int, world: int, stage: int, fp8: Fp8) -> tuple[list[float], Weights]:
    return train(rank, stage, 3, fp8=fp8)


@KINDS
@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_computes_what_plain_torch_does_with_the_same_codes(stage: int, fp8: Fp8) -> None:
    losses, weights = run_ranks(1, _one, stage, fp8)[0]
    expected_losses, expected = train_alone(3, fp8)
    assert losses == expected_losses
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-7)


def _stages(rank: int, world: int, fp8: Fp8) -> list[tuple[list[float], Weights]]:
    return [train(rank, stage, 3, fp8=fp8) for stage in range(4)]


@KINDS
@pytest.mark.parametrize("world", [2, 3])
def test_all_stages_have_the_same_bits(world: int, fp8: Fp8) -> None:
    for stages in run_ranks(world, _stages, fp8):
        losses, weights = stages[0]
        for other_losses, other in stages[1:]:
            assert other_losses == losses
            for name, value in weights.items():
                torch.testing.assert_close(other[name], value, rtol=0, atol=0 if world == 2 else 1e-6)


def _held_and_sent(rank: int, world: int, stage: int, fp8: Fp8) -> None:
    model = build(fp8)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(stage, fp8=fp8))
    assert optimizer is not None
    plan = zeroshard.plan_of(model)
    assert plan == Plan.from_json(plan.to_json())
    resting = {segment.name for _, group in plan.groups() if group.scaled for segment in group.layout.segments}
    assert resting == {f"{layer}.weight" for layer in LAYERS}
    for step in range(3):
        forget_sent(model)
        loss_of(model, batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    zeroshard.drain(model)
    plan = zeroshard.plan_of(model)
    assert held_bytes(model) == replace(state_bytes(plan), no_sync=0)
    assert sent(model) == step_traffic(plan)
    weights = dict(zeroshard.iterate_full_parameters(model))
    codes_are_those_of_whole_weights(model, weights)
    zeroshard.close(model)


@KINDS
@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_and_traffic_are_the_plans_and_codes_those_of_the_whole_weight(stage: int, fp8: Fp8) -> None:
    run_ranks(3, _held_and_sent, stage, fp8)


def test_a_plan_whose_scales_are_not_those_of_its_products_is_refused() -> None:
    model = build(BY_BLOCK)
    plan = zeroshard.build_plan(find_units(model), with_products(recipe(3, fp8=BY_BLOCK), model)[0], 2)
    assert any(group.scale_block for _, group in plan.groups())
    with pytest.raises(PlanError, match=r"scale_block must be 0, as the scaling of policy\.products has it, not 128"):
        plan.with_policy(products=Products(Scaling.TENSORWISE, LAYERS))


def _values_elsewhere(rank: int, world: int, stage: int, fp8: Fp8) -> None:
    model = build(fp8)
    model, _ = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(stage, fp8=fp8))
    weight = model.get_parameter("blocks.0.up.weight")
    truth = build(fp8).get_parameter("blocks.0.up.weight").detach()
    with pytest.raises(UsageError, match=r"blocks\.0\.up\.weight"):
        weight.norm()
    with pytest.raises(UsageError, match="GatheredParameters"):
        weight.data.mul_(2)
    why = "is sharded" if stage == 3 else "rests in fp8"
    with pytest.raises(UsageError, match=rf"state_dict\(\).*{why}.*full_state_dict"):
        model.state_dict()
    with pytest.raises(UsageError, match=rf"load_state_dict\(\).*{why}.*GatheredParameters"):
        model.load_state_dict({})
    with pytest.raises(UsageError, match=r"blocks\.0\.up\.weight"):
        weight.detach().clone()
    with zeroshard.GatheredParameters([weight]):
        assert torch.equal(weight, truth.bfloat16())
    assert torch.equal(zeroshard.safe_get_full_fp32_param(weight), truth)
    with zeroshard.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.mul_(2)
    assert torch.equal(zeroshard.safe_get_full_fp32_param(weight), truth.bfloat16().float() * 2)
    zeroshard.safe_set_full_fp32_param(weight, truth * 3)
    weights = dict(zeroshard.iterate_full_parameters(model))
    assert torch.equal(weights["blocks.0.up.weight"], truth * 3)
    codes_are_those_of_whole_weights(model, weights)
    zeroshard.close(model)
    assert type(model.get_submodule("blocks.0.up")) is nn.Linear


@KINDS
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_values_are_those_of_the_truth_and_refused_elsewhere(stage: int, fp8: Fp8) -> None:
    run_ranks(2, _values_elsewhere, stage, fp8)


class _Reader(nn.Module):
    """Reads a weight of its first block, and that of its own layer, beside calling them."""

    def __init__(self, fp8: Fp8) -> None:
        super().__init__()
        self.inner = build(fp8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = self.inner.get_parameter("blocks.0.down.weight").float().square().sum()
        return self.inner(x) + 0.01 * penalty.to(x.dtype)


def _read(rank: int, world: int, stage: int, fp8: Fp8) -> list[Weights]:
    found: list[Weights] = []
    for chosen in (stage, 0):
        torch.manual_seed(11)
        model: nn.Module = _Reader(fp8)
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(chosen, fp8=fp8))
        assert optimizer is not None
        for step in range(3):
            loss_of(model, batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(dict(zeroshard.iterate_full_parameters(model)))
        zeroshard.close(model)
    return found


@KINDS
@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_reads_what_the_codes_stand_for_and_its_gradient_arrives(stage: int, fp8: Fp8) -> None:
    for ours, whole in run_ranks(2, _read, stage, fp8):
        for name, value in whole.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)


def _save(rank: int, world: int, folder: str, stage: int, load: bool, fp8: Fp8) -> Weights:
    model = build(fp8)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(stage, fp8=fp8))
    assert optimizer is not None
    if load:
        zeroshard.load(model, folder, "one")
    for step in range(2):
        loss_of(model, batch(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if not load:
        zeroshard.save(model, folder, "one")
    found = dict(zeroshard.iterate_full_parameters(model))
    zeroshard.close(model)
    return found


@KINDS
def test_a_checkpoint_has_the_float32_truth_and_goes_on_at_another_shape(tmp_path: Path, fp8: Fp8) -> None:
    run_ranks(2, _save, str(tmp_path), 3, False, fp8)
    first = run_ranks(2, _save, str(tmp_path), 3, True, fp8)[0]
    other = run_ranks(1, _save, str(tmp_path), 0, True, fp8)[0]
    for name, value in first.items():
        assert torch.equal(other[name], value), name


def _closed(rank: int, world: int, stage: int, fp8: Fp8) -> None:
    model = build(fp8)
    model, _ = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(stage, fp8=fp8))
    zeroshard.close(model)
    for (name, value), truth in zip(model.named_parameters(), build(fp8).parameters(), strict=True):
        assert torch.equal(value, truth.bfloat16()), name


@KINDS
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_closed_model_on_one_rank_has_the_truth(stage: int, fp8: Fp8) -> None:
    run_ranks(1, _closed, stage, fp8)
