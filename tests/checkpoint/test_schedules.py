"""Torch's own schedules in a checkpoint: each goes on as if it had not been interrupted, or is refused whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedules
from torch.optim.lr_scheduler import LRScheduler

import zeroshard
from zeroshard.engine.engine import Engine
from zeroshard.errors import CheckpointError

Make = Callable[[torch.optim.Optimizer], LRScheduler]
S = torch_schedules


def sequence(optimizer: torch.optim.Optimizer, *counts: int) -> LRScheduler:
    """Warm-up, then drops after so many steps."""
    parts = [S.LinearLR(optimizer, 0.1, total_iters=2), S.MultiStepLR(optimizer, list(counts), gamma=0.5)]
    return S.SequentialLR(optimizer, parts, [2])


SCHEDULES: dict[str, Make] = {
    "MultiStepLR, two milestones at once": lambda optimizer: S.MultiStepLR(optimizer, [2, 5, 5, 7]),
    "SequentialLR": lambda optimizer: sequence(optimizer, 1, 4),
    "ChainedScheduler": lambda optimizer: S.ChainedScheduler(
        [S.ConstantLR(optimizer, total_iters=4), S.ExponentialLR(optimizer, 0.9)]
    ),
    "LambdaLR": lambda optimizer: S.LambdaLR(optimizer, lambda step: 0.9**step),
    "CyclicLR with momentum": lambda optimizer: S.CyclicLR(optimizer, 0.01, 0.5, 3, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": lambda optimizer: S.CosineAnnealingWarmRestarts(optimizer, 3),
}


class Particular(S.ConstantLR):
    """A schedule that does not take its own state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 9.0
        raise KeyError("horizon")


def start(make: Make) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    return zeroshard.initialize(model=nn.Linear(4, 4), config=config, lr_scheduler=make)[0]


def rates(engine: Engine, steps: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        found += [engine.get_lr(), engine.get_mom()]
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_torch_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    whole, resumed = start(SCHEDULES[name]), start(SCHEDULES[name])
    rates(whole, 3)
    whole.save_checkpoint(tmp_path)
    resumed.load_checkpoint(tmp_path)
    assert rates(whole, 6) == rates(resumed, 6)
    assert {key: type(value) for key, value in vars(whole.lr_scheduler).items()} == {
        key: type(value) for key, value in vars(resumed.lr_scheduler).items()
    }
    for engine in (whole, resumed):
        engine.destroy()


def test_the_milestones_of_a_schedule_inside_of_another_are_counted_as_before(tmp_path: Path) -> None:
    saved, resumed = start(SCHEDULES["SequentialLR"]), start(SCHEDULES["SequentialLR"])
    saved.save_checkpoint(tmp_path)
    resumed.load_checkpoint(tmp_path)
    assert resumed.lr_scheduler._schedulers[1].milestones == Counter({1: 1, 4: 1})
    for engine in (saved, resumed):
        engine.destroy()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda optimizer: S.SequentialLR(optimizer, [S.ConstantLR(optimizer)], []), "made of 2 .* run's of 1"),
        (
            lambda optimizer: S.SequentialLR(optimizer, [S.ConstantLR(optimizer) for _ in range(3)], [2, 4]),
            "made of 2 .* run's of 3",
        ),
        (lambda optimizer: S.StepLR(optimizer, 1), "scheduler is SequentialLR, this run's StepLR"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_before_anything_is_loaded(
    make: Make, words: str, tmp_path: Path
) -> None:
    saved, other = start(SCHEDULES["SequentialLR"]), start(make)
    saved.save_checkpoint(tmp_path)
    before = zeroshard.full_state_dict(other.module)
    with pytest.raises(CheckpointError, match=rf"(?s){words}.*load_lr_scheduler_states=False"):
        other.load_checkpoint(tmp_path)
    after = zeroshard.full_state_dict(other.module)
    assert all(torch.equal(before[name], after[name]) for name in before)
    other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    for engine in (saved, other):
        engine.destroy()


def test_a_schedule_that_fails_to_load_leaves_rates_and_weights_as_they_were(tmp_path: Path) -> None:
    engine = start(Particular)
    rate = engine.get_lr()
    engine.save_checkpoint(tmp_path)
    before = zeroshard.full_state_dict(engine.module)
    rates(engine, 1)
    moved = zeroshard.full_state_dict(engine.module)
    with pytest.raises(CheckpointError, match="horizon"):
        engine.load_checkpoint(tmp_path)
    after = zeroshard.full_state_dict(engine.module)
    assert not torch.equal(before["weight"], after["weight"])
    assert torch.equal(moved["weight"], after["weight"])
    assert engine.get_lr() == rate
    engine.destroy()
