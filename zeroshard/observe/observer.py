"""Watches the steps of one engine, and hands what each was to whoever is to hear of it.

    forward, backward, update    two marks in time each; the loss is added up where it lies
    update                       loss and loss scale start for the host, behind the backwards and before the update
    concluded                    the outcome is known: the step waits in line until its numbers have arrived
    record                       to the listeners, in the order of the steps

Nothing here waits for the device: a step whose numbers have not arrived is handed on at a later one. Rejected: to read
all at every n-th step, which needs the device to stand still and hides what happens between.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zeroshard.engine.observing import Disk, Outcome, StepFacts, TimedBatches
from zeroshard.observe.device_waits import DeviceStep, DeviceWaits
from zeroshard.observe.flops.step import StepFlops
from zeroshard.observe.host import NOTHING, HostStep, HostTimes
from zeroshard.observe.late import LateNumber
from zeroshard.observe.monitor import EventMonitor
from zeroshard.observe.record import StepRecord
from zeroshard.observe.throughput import StepRates
from zeroshard.observe.times import StepTimes, Times

_UNCOUNTED = nullcontext()


class Listener(Protocol):
    """Hears of each step, once all of it is known."""

    def heard(self, record: StepRecord) -> None: ...

    def report(self, facts: StepFacts, *, due: bool) -> None:
        """After each step: print what is to be printed then."""
        ...

    def disk(self, what: Disk, seconds: float, left_out: Sequence[str]) -> None:
        """A checkpoint was saved or loaded; `left_out` names what of it was not loaded."""
        ...

    def close(self) -> None: ...


@dataclass
class _Step:
    facts: StepFacts
    loss: LateNumber | None
    scale: LateNumber | None
    tokens: int | None
    times: StepTimes
    host: HostStep
    device: DeviceStep | None
    outcome: tuple[Outcome, int] | None = None

    @property
    def ready(self) -> bool:
        numbers = [number for number in (self.loss, self.scale) if number is not None]
        timed = self.times.passed and (self.device is None or self.device.passed)
        return self.outcome is not None and timed and all(number.arrived for number in numbers)

    def record(self) -> StepRecord:
        assert self.outcome is not None
        facts, host, (outcome, skipped) = self.facts, self.host, self.outcome
        return StepRecord(
            step=facts.step,
            samples=facts.samples,
            batch=facts.batch,
            tokens=self.tokens,
            loss=None if self.loss is None else self.loss.read(),
            norm=outcome.norm,
            applied=outcome.applied,
            skipped=skipped,
            rates=facts.rates,
            scale=None if self.scale is None else self.scale.read(),
            seconds={str(part): seconds for part, seconds in self.times.seconds().items()},
            whole=self.times.whole(),
            ended=time.time(),
            nonfinite=outcome.nonfinite,
            waits=host.waits,
            busy=host.busy,
            host=host.figures,
            device_waits=None if self.device is None else self.device.seconds(),
        )


class StepObserver:
    """The observer of an engine.

    Args:
        rates: how fast the steps are; told with the lines of progress where `tells_rates`.
        listeners: who hears of each step, in this order.
        flops: what counts the FLOPs of one step.
        host: follows what the host waits for; None where nobody asks for it.
        device_waits: times what compute waits for on a device; None where nobody asks for it, and on a CPU.
    """

    def __init__(
        self,
        device: torch.device,
        monitor: EventMonitor,
        rates: StepRates,
        listeners: Sequence[Listener],
        flops: StepFlops | None = None,
        host: HostTimes | None = None,
        device_waits: DeviceWaits | None = None,
        *,
        tells_rates: bool,
    ) -> None:
        self._host, self._device_waits = host, device_waits
        self.monitor = monitor
        self.throughput = rates
        self._flops = flops
        self._listeners = listeners if flops is None else (flops, *listeners)
        self._tells_rates = tells_rates
        self._times = Times(device)
        self._loss: torch.Tensor | None = None
        self._tokens: int | None = None
        self._facts: StepFacts | None = None
        self._steps: deque[_Step] = deque()
        self._closed = False

    @contextmanager
    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Around a forward; one without gradients is an evaluation, which no step's time holds."""
        if not torch.is_grad_enabled():
            self._times.interrupt()
            yield
            return
        tokens = _tokens_of(args, kwargs)
        if tokens is not None:
            self._tokens = (self._tokens or 0) + tokens
        if self._host is not None and self._times.at_beginning:
            self._host.restart()
        counted = _UNCOUNTED if self._flops is None else self._flops.of_forward()
        with self._part("forward"), self._times.of("forward"), counted:
            yield

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Around a backward; `loss` is divided by the accumulation steps, so the sum over a step is its mean."""
        counted = _UNCOUNTED if self._flops is None else self._flops.of_backward()
        with self._part("backward"), self._times.of("backward"), counted:
            yield
        part = loss.detach()
        self._loss = part if self._loss is None else self._loss + part

    @contextmanager
    def update(self, facts: StepFacts) -> Iterator[None]:
        """Around the update of a step."""
        while self._steps and self._steps[-1].outcome is None:
            self._steps.pop()  # its outcome was an error, and nobody will tell more of it
        self._facts = facts
        loss, self._loss = self._loss, None
        tokens, self._tokens = self._tokens, None
        scale = None if facts.scale is None else LateNumber(facts.scale)
        late = None if loss is None else LateNumber(loss)
        with self._part("step"), self._times.of("step"):
            yield
        host = NOTHING if self._host is None else self._host.take()
        device = None if self._device_waits is None else self._device_waits.take()
        self._steps.append(_Step(facts, late, scale, tokens, self._times.take(), host, device))

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        of_host = _UNCOUNTED if self._host is None else self._host.part(name)
        of_device = _UNCOUNTED if self._device_waits is None else self._device_waits.part(name)
        with of_host, of_device:
            yield

    @property
    def timed(self) -> TimedBatches | None:
        """Times the waits for the batches of a loader; None where the host is not followed."""
        return None if self._host is None else self._host.timed

    def concluded(self, report: Outcome, *, skipped: int) -> None:
        """The outcome of the last step is known."""
        if self._steps and self._steps[-1].outcome is None:
            self._steps[-1].outcome = report, skipped
        self._hand_on()

    def _hand_on(self) -> None:
        while self._steps and self._steps[0].ready:
            record = self._steps.popleft().record()
            self.throughput.add(record)
            for listener in self._listeners:
                listener.heard(record)
        self.monitor.flush()

    def progress(self) -> list[str]:
        """How fast the steps were since the last line of progress."""
        return self.throughput.tell() if self._tells_rates else []

    def report(self, step: int, *, due: bool) -> None:
        """After each step."""
        if self._facts is not None:
            for listener in self._listeners:
                listener.report(self._facts, due=due)

    @contextmanager
    def disk(self, what: Disk, left_out: Sequence[str] = ()) -> Iterator[None]:
        """Around a checkpoint that is saved or loaded."""
        self._times.interrupt()
        begin = time.perf_counter()
        yield
        self._times.interrupt()
        for listener in self._listeners:
            listener.disk(what, time.perf_counter() - begin, left_out)

    def close(self) -> None:
        """Hand on what has arrived; what has not is lost, for the device may never come to it."""
        if self._closed:
            return
        self._closed = True
        self._hand_on()
        for listener in self._listeners:
            listener.close()
        self.monitor.close()
        if self._host is not None:
            self._host.close()


def _tokens_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Elements of `input_ids`, or of the first input of whole numbers and at least two dimensions."""
    named = kwargs.get("input_ids")
    for value in (named, *args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() >= 2:
            return value.numel()
    return None
