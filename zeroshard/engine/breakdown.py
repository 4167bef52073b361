"""Where the time of training goes: forward, backward and step, for `wall_clock_breakdown`.

    with breakdown.of("forward"): ...    two events on the device's stream; on a processor two readings of the clock
    breakdown.line()                     mean milliseconds of a step, of the steps whose events have passed by now

The device is never waited for: what has not passed yet counts in a later line. Rejected: reading the clock after a
synchronization, which would slow down what it measures.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Part = Literal["forward", "backward", "step"]
PARTS: tuple[Part, ...] = ("forward", "backward", "step")


class _Mark:
    """A moment, on the device's stream where there is one."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._seconds = time.perf_counter()

    @property
    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def milliseconds_to(self, later: _Mark) -> float:
        if self._event is not None and later._event is not None:
            return self._event.elapsed_time(later._event)
        return (later._seconds - self._seconds) * 1000


class Breakdown:
    """Times the parts of the steps of one engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: list[tuple[Part, _Mark, _Mark]] = []
        self._ended: deque[list[tuple[Part, _Mark, _Mark]]] = deque()

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Time what happens inside; a part that raises is not counted."""
        begin = _Mark(self._device)
        yield
        self._running.append((part, begin, _Mark(self._device)))

    def end_step(self) -> None:
        """An optimizer step is over: what was timed since the last one belongs to it."""
        self._ended.append(self._running)
        self._running = []

    def line(self) -> str | None:
        """Mean milliseconds per step of the steps that have passed since the last line; None where none has."""
        totals: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        steps = 0
        while self._ended and all(end.passed for _, _, end in self._ended[0]):
            steps += 1
            for part, begin, end in self._ended.popleft():
                totals[part] += begin.milliseconds_to(end)
        if not steps:
            return None
        times = ", ".join(f"{part} {total / steps:.2f} ms" for part, total in totals.items())
        return f"{times} (mean of {steps} step{'s' if steps > 1 else ''})"
