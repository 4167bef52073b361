"""How long the parts of a step take: forward, backward and step, by events on a GPU and by the clock on a CPU.

    with times.of("forward"): ...    two events on the device's stream; on a processor two readings of the clock
    times.take()                     what was timed since the last call: the times of one step
    step.passed                      whether the device has done all of it; then `step.seconds` reads without waiting

A step lasts from the end of the one before to its own end, so waiting for data counts; where something else came
between (an evaluation, a checkpoint), from its first forward. What a block computes again in the backward is time of
the backward. The device is never waited for. Rejected: reading the clock after a synchronization, which would slow
down what it measures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

Part = Literal["forward", "backward", "step"]
PARTS: tuple[Part, ...] = ("forward", "backward", "step")


class Mark:
    """A moment, on the device's stream where there is one."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._seconds = time.perf_counter()

    @property
    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def seconds_to(self, later: Mark) -> float:
        """Seconds between two moments that have passed."""
        if self._event is not None and later._event is not None:
            return self._event.elapsed_time(later._event) / 1000
        return later._seconds - self._seconds


@dataclass(frozen=True)
class StepTimes:
    """The moments of one step.

    Attributes:
        spans: begin and end of each part, as often as it ran.
        begin: where the step begins; None where nothing of it was timed.
        end: where its update ends.
    """

    spans: tuple[tuple[Part, Mark, Mark], ...]
    begin: Mark | None
    end: Mark

    @property
    def passed(self) -> bool:
        """Whether the times can be read without waiting."""
        return self.end.passed and all(end.passed for _, _, end in self.spans)  # which may be of several streams

    def seconds(self) -> dict[Part, float]:
        """Seconds of each part, added up over the micro-batches."""
        totals: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        for part, begin, end in self.spans:
            totals[part] += begin.seconds_to(end)
        return totals

    def whole(self) -> float | None:
        """Seconds of the whole step."""
        return None if self.begin is None else self.begin.seconds_to(self.end)


class Times:
    """Times the steps of one engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Part, Mark, Mark]] = []
        self._last: Mark | None = None

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Time what happens inside; a part that raises is not counted."""
        begin = Mark(self._device)
        yield
        self._spans.append((part, begin, Mark(self._device)))

    @property
    def at_beginning(self) -> bool:
        """Whether the next step begins with what is timed next, and not at the end of the one before."""
        return self._last is None and not self._spans

    def interrupt(self) -> None:
        """Something that is no training comes: the next step begins with its first forward."""
        self._last = None

    def take(self) -> StepTimes:
        """An optimizer step is over: what was timed since the last one belongs to it."""
        spans, self._spans = tuple(self._spans), []
        end = spans[-1][2] if spans else Mark(self._device)
        begin = self._last if self._last is not None else spans[0][1] if spans else None
        self._last = end
        return StepTimes(spans, begin, end)
