"""What has not arrived is neither read nor waited for, and nothing that comes later overtakes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from zeroshard.engine.observing import StepFacts
from zeroshard.engine.step.step_base import StepReport
from zeroshard.observe import monitor as monitors
from zeroshard.observe import observer as observers
from zeroshard.observe.listeners import Silent
from zeroshard.observe.monitor import EventMonitor, Written
from zeroshard.observe.observer import StepObserver
from zeroshard.observe.record import StepRecord
from zeroshard.observe.throughput import StepRates
from zeroshard.observe.times import Mark


class Travelling:
    """A number that is on its way until it is let go; stands for one on a GPU."""

    def __init__(self, value: Any) -> None:
        self.value = float(value)
        self.arrived = self.value >= 0

    def read(self) -> float:
        assert self.arrived, "read before it arrived"
        return abs(self.value)


class Kept:
    def __init__(self) -> None:
        self.events: list[Written] = []

    def write(self, events: Sequence[Written]) -> None:
        self.events += events

    def close(self) -> None: ...


class Heard(Silent):
    def __init__(self) -> None:
        self.steps: list[tuple[int, float | None]] = []

    def heard(self, record: StepRecord) -> None:
        self.steps.append((record.step, record.loss))


def test_events_are_written_in_order_when_the_first_of_them_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "LateNumber", Travelling)
    kept = Kept()
    monitor = EventMonitor([kept], enabled=True)
    monitor.write_events([("a", 1.0, 1), ("b", -2.0, 1)])
    monitor.write_events([("a", 3.0, 2)])
    assert kept.events == [("a", 1.0, 1)]
    monitor._late[0][1].arrived = True
    monitor.flush()
    assert kept.events == [("a", 1.0, 1), ("b", 2.0, 1), ("a", 3.0, 2)]


def _observer(heard: Heard) -> StepObserver:
    monitor = EventMonitor((), enabled=False)
    return StepObserver(torch.device("cpu"), monitor, StepRates(1), [heard], tells_rates=False)


def _step(observer: StepObserver, number: int, loss: float) -> None:
    with observer.forward((), {}):
        pass
    with observer.backward(torch.tensor(loss)):
        pass
    with observer.update(StepFacts(number, number, 1, 1, [], None)):
        pass


def test_steps_are_handed_on_in_order_when_loss_times_and_outcome_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "LateNumber", Travelling)
    heard = Heard()
    observer = _observer(heard)
    _step(observer, 1, -1.0)
    assert heard.steps == []
    observer.concluded(StepReport(applied=True, norm=1.0), skipped=0)
    _step(observer, 2, 2.0)
    observer.concluded(StepReport(applied=True, norm=1.0), skipped=0)
    assert heard.steps == [], "the loss of the first step is on its way"
    late = observer._steps[0].loss
    assert late is not None
    monkeypatch.setattr(late, "arrived", True)
    monkeypatch.setattr(Mark, "passed", False)
    _step(observer, 3, 3.0)
    assert heard.steps == [], "its end has not passed"
    monkeypatch.setattr(Mark, "passed", True)
    observer.concluded(StepReport(applied=True, norm=1.0), skipped=0)
    assert heard.steps == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_step_that_ended_in_an_error_is_passed_by() -> None:
    heard = Heard()
    observer = _observer(heard)
    with pytest.raises(RuntimeError):
        with observer.update(StepFacts(1, 1, 1, 1, [], None)):
            raise RuntimeError
    observer.concluded(StepReport(applied=False), skipped=0)
    _step(observer, 2, 2.0)  # whose outcome is an error when it is asked for, so that nothing concludes it
    _step(observer, 3, 3.0)
    observer.concluded(StepReport(applied=True, norm=1.0), skipped=0)
    assert heard.steps == [(3, 3.0)]


def test_a_loss_that_is_changed_afterwards_is_told_as_it_was() -> None:
    heard = Heard()
    observer = _observer(heard)
    loss = torch.tensor(2.0)
    with observer.backward(loss):
        pass
    with observer.update(StepFacts(1, 1, 1, 1, [], None)):
        loss.fill_(7.0)
    observer.concluded(StepReport(applied=True, norm=1.0), skipped=0)
    assert heard.steps == [(1, 2.0)]
