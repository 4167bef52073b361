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
from zeroshard.errors import UsageError
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.plan import Plan
from zeroshard.plan.traffic import step_traffic

Weights = dict[str, torch.Tensor]


def _one(rank: int, world: int, stage: int) -> tuple[list[float], Weights]:
    return train(rank, stage, 3)


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_computes_what_plain_torch_does_with_the_same_codes(stage: int) -> None:
    losses, weights = run_ranks(1, _one, stage)[0]
    expected_losses, expected = train_alone(3)
    assert losses == expected_losses
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-7)


def _stages(rank: int, world: int) -> list[tuple[list[float], Weights]]:
    return [train(rank, stage, 3) for stage in range(4)]


@pytest.mark.parametrize("world", [2, 3])
def test_all_stages_have_the_same_bits(world: int) -> None:
    for stages in run_ranks(world, _stages):
        losses, weights = stages[0]
        for other_losses, other in stages[1:]:
            assert other_losses == losses
            for name, value in weights.items():
                torch.testing.assert_close(other[name], value, rtol=0, atol=0 if world == 2 else 1e-6)


def _held_and_sent(rank: int, world: int, stage: int) -> None:
    model = build()
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(stage))
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


@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_and_traffic_are_the_plans_and_codes_those_of_the_whole_weight(stage: int) -> None:
    run_ranks(3, _held_and_sent, stage)


def _values_elsewhere(rank: int, world: int, stage: int) -> None:
    model = build()
    model, _ = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(stage))
    weight = model.get_parameter("blocks.0.up.weight")
    truth = build().get_parameter("blocks.0.up.weight").detach()
    with pytest.raises(UsageError, match=r"blocks\.0\.up\.weight"):
        weight.norm()
    with pytest.raises(UsageError, match="GatheredParameters"):
        weight.data.mul_(2)
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


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_values_are_those_of_the_truth_and_refused_elsewhere(stage: int) -> None:
    run_ranks(2, _values_elsewhere, stage)


class _Reader(nn.Module):
    """Reads a weight of its first block, and that of its own layer, beside calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = self.inner.get_parameter("blocks.0.down.weight").float().square().sum()
        return self.inner(x) + 0.01 * penalty.to(x.dtype)


def _read(rank: int, world: int, stage: int) -> list[Weights]:
    found: list[Weights] = []
    for chosen in (stage, 0):
        torch.manual_seed(11)
        model: nn.Module = _Reader()
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(chosen))
        assert optimizer is not None
        for step in range(3):
            loss_of(model, batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(dict(zeroshard.iterate_full_parameters(model)))
        zeroshard.close(model)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_reads_what_the_codes_stand_for_and_its_gradient_arrives(stage: int) -> None:
    for ours, whole in run_ranks(2, _read, stage):
        for name, value in whole.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)


def _save(rank: int, world: int, folder: str, stage: int, load: bool) -> Weights:
    model = build()
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(stage))
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


def test_a_checkpoint_has_the_float32_truth_and_goes_on_at_another_shape(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path), 3, False)
    first = run_ranks(2, _save, str(tmp_path), 3, True)[0]
    other = run_ranks(1, _save, str(tmp_path), 0, True)[0]
    for name, value in first.items():
        assert torch.equal(other[name], value), name
