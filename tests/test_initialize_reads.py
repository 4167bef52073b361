"""Scripts read and write parameters right behind `step()`, as loops of one process do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks

STEPS, WIDTH = 6, 192
BOUND = 0.06
"""Weights are clamped here behind each step: some are larger from the start, and others after the first step."""


def _model() -> nn.Module:
    torch.manual_seed(3)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _follow(model: nn.Module, averages: dict[str, torch.Tensor]) -> None:
    """What scripts do behind a step: clamp weights past their version counters, and average what is there."""
    for name, parameter in model.named_parameters():
        parameter.data.clamp_(-BOUND, BOUND)
        averages.setdefault(name, torch.zeros_like(parameter)).lerp_(parameter.detach(), 0.5)


def _plain(ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Averages and weights of one process with the batches of all ranks."""
    model, averages = _model(), dict[str, torch.Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        for rank in range(ranks):
            (model(_batch(step, rank)).square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        _follow(model, averages)
    return averages, {name: value.detach() for name, value in model.named_parameters()}


def _largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def _differences(rank: int, ranks: int, stage: int, zero: dict[str, Any]) -> tuple[float, float]:
    """How far the averages and the weights are from those of one process."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10**6, **zero},
    }
    engine, *_ = zeroshard.initialize(model=_model(), config=config)
    averages: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        engine.backward(engine(_batch(step, rank)).square().mean())
        engine.step()
        _follow(engine.module, averages)
    plain_averages, plain_weights = _plain(ranks)
    weights = dict(zeroshard.iterate_full_parameters(engine.module))
    engine.destroy()
    return _largest_difference(averages, plain_averages), _largest_difference(weights, plain_weights)


@pytest.mark.parametrize("zero", [{}, {"overlap_comm": True}], ids=["default", "overlap_comm"])
def test_parameters_that_rest_whole_can_be_averaged_and_clamped_right_behind_a_step(zero: dict[str, Any]) -> None:
    for stage, found in run_ranks(2, _all_stages, zero)[0].items():
        assert max(found) < 1e-5, (stage, found)


def _all_stages(rank: int, ranks: int, zero: dict[str, Any]) -> dict[int, tuple[float, float]]:
    return {stage: _differences(rank, ranks, stage, zero) for stage in range(4)}
