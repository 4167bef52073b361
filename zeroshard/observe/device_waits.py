"""What compute waits for on a device, by events around each of its waits for another stream, in one step of some.

    compute   kernels | begin .... wait for the gather .... end | kernels
                        <------- exposed all-gather ----------->

The two events of a wait are read once the device has passed them, so nothing is waited for. They cost the host some
microseconds each, so one step of eight is timed; the others have no device waits in their record. A wait that a CUDA
graph captures is not timed. Rejected: times of the collectives themselves, which say nothing of how much of them is
hidden behind compute; all steps, which costs a host-bound step more than it may.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zeroshard.observe.host import BETWEEN, LINK
from zeroshard.observe.times import Mark
from zeroshard.plan.legs import Stream

EVERY = 8
"""One step of so many is timed."""
KINDS = {
    Stream.GATHER: "all-gather",
    Stream.REDUCE: "reduce-scatter",
    Stream.UPLOAD: LINK,
    Stream.UPDATE: LINK,
    Stream.DOWNLOAD: LINK,
}
"""What a wait for a stream is called: as the plan calls its collectives, or the link to host memory."""


@dataclass(frozen=True)
class DeviceStep:
    """The waits of compute in one step: the part of the step, what was waited for, and both moments."""

    waits: tuple[tuple[str, str, Mark, Mark], ...]

    @property
    def passed(self) -> bool:
        """Whether they can be read without waiting."""
        return all(end.passed for *_, end in self.waits)

    def seconds(self) -> dict[str, dict[str, float]]:
        """Seconds by part and by what was waited for."""
        found: dict[str, dict[str, float]] = {}
        for part, kind, begin, end in self.waits:
            waits = found.setdefault(part, {})
            waits[kind] = waits.get(kind, 0.0) + begin.seconds_to(end)
        return found


class DeviceWaits:
    """Times the waits of one engine's compute stream; `zeroshard.engine.core.streams` calls `waiting`.

    Args:
        every: one step of so many is timed.
    """

    def __init__(self, device: torch.device, every: int = EVERY) -> None:
        self._device, self._every = device, every
        self._part = BETWEEN
        self._steps = 0
        self._waits: list[tuple[str, str, Mark, Mark]] = []
        self.active = every == 1
        """Whether the waits of this step are timed."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the step."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    @contextmanager
    def waiting(self, stream: Stream) -> Iterator[None]:
        """Around a wait of compute for an event of `stream`, while `active`."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield
            return
        begin = Mark(self._device)
        yield
        self._waits.append((self._part, KINDS[stream], begin, Mark(self._device)))

    def take(self) -> DeviceStep | None:
        """A step is over: its waits, or None where it was not timed."""
        timed = DeviceStep(tuple(self._waits)) if self.active else None
        self._waits = []
        self._steps += 1
        self.active = self._steps % self._every == self._every - 1
        return timed


def merged(
    host: Mapping[str, Mapping[str, float]], device: Mapping[str, Mapping[str, float]]
) -> dict[str, Mapping[str, float]]:
    """Waits of the host and of the device by part; kinds that both have are added up."""
    found: dict[str, Mapping[str, float]] = dict(host)
    for part, waits in device.items():
        mine = found.get(part, {})
        found[part] = {**mine, **{kind: mine.get(kind, 0.0) + seconds for kind, seconds in waits.items()}}
    return found
