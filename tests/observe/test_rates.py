"""Times and rates are right whatever a step is made of, by a clock that the model itself moves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.test_initialize import ADAMW

WAIT, EVALUATION = 0.5, 100.0


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


class Block(nn.Module):
    """Takes half a second per sample in each forward, also in one that is computed again."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.clock = [clock]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock[0].now += x.shape[0] / 2
        return self.inner(x)


class Slow(nn.Module):
    """A second per sample."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(clock) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _engine(clock: Clock, micro: int, accumulation: int, **more: Any) -> Any:
    sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
    config = {**sizes, "optimizer": ADAMW, "steps_per_print": 2, **more}
    engine, *_ = zeroshard.initialize(model=Slow(clock), config=config)
    return engine


def _step(engine: Any, clock: Clock) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        clock.now += WAIT / engine.gradient_accumulation_steps()  # for the data
        engine.backward(engine(torch.randn(engine.train_micro_batch_size_per_gpu(), 4)).square().mean())
        engine.step()


@pytest.mark.parametrize(("micro", "accumulation"), [(8, 1), (2, 4)])
def test_the_rate_does_not_depend_on_how_a_batch_is_cut_and_waiting_for_data_counts(
    micro: int, accumulation: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    engine = _engine(clock, micro, accumulation)
    assert engine.tput_timer.avg_samples_per_sec() == 0.0
    for _ in range(4):
        _step(engine, clock)
    assert engine.tput_timer.avg_samples_per_sec() == pytest.approx(8 / (8 + WAIT))
    told = [line.rpartition(", ")[2] for line in capsys.readouterr().out.splitlines()]
    assert told[1] == f"{8 / (8 + WAIT):.4g} samples/s"
    engine.destroy()


def test_an_evaluation_and_a_checkpoint_are_no_time_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    engine = _engine(clock, 8, 1)
    for _ in range(2):
        _step(engine, clock)
    with torch.no_grad():
        clock.now += EVALUATION
        engine(torch.randn(3, 4))
    _step(engine, clock)
    clock.now += EVALUATION
    engine.save_checkpoint(tmp_path)
    clock.now += EVALUATION
    _step(engine, clock)
    _step(engine, clock)
    seconds = (8 + WAIT) * 2 + 8 * 2  # the two that follow an interruption begin with their forward
    assert engine.tput_timer.avg_samples_per_sec() == pytest.approx(4 * 8 / seconds)
    engine.destroy()


def test_what_is_computed_again_is_time_of_the_backward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for policy, backward in (("calls", 0.0), ("full", 8000.0)):
        clock = Clock(monkeypatch)
        more = {"wall_clock_breakdown": True, "activation_checkpointing": {"policy": policy}}
        engine = _engine(clock, 2, 4, **more)
        _step(engine, clock)
        _step(engine, clock)
        line = capsys.readouterr().out.splitlines()[-1]
        assert line == f"step 2: forward 8000.00 ms, backward {backward:.2f} ms, step 0.00 ms (mean of 2 steps)"
        engine.destroy()


def test_tokens_are_the_elements_of_the_input_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Language(Slow):
        def forward(self, mask: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids.float())

    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "steps_per_print": 2}
    engine, *_ = zeroshard.initialize(model=Language(clock), config=config)
    for _ in range(3):
        ids = torch.ones(2, 4, dtype=torch.int64)
        engine.backward(engine(torch.ones(2, 4, 4, dtype=torch.int64), input_ids=ids).square().mean())
        engine.step()
    assert engine.tput_timer.avg_tokens_per_sec() == pytest.approx(4.0)
    engine.destroy()
