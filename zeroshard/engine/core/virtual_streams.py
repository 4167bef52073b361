"""A checking backend for tests: streams on a CPU that run as late or as early as the events allow, or in between, and a
check that every pair of conflicting accesses is ordered by events.

Two checks at once:

    order      work on a side stream waits in its queue; a schedule decides how far queues advance on each call, and
    only
               an awaited event forces them to advance. A result that depends on the order differs between schedules.
    hazards    every stream has a vector clock; events copy it, waits merge it. An access to a buffer that is not
    ordered
               after the last conflicting access is a race, whatever the order in this run was.

Compute runs directly on the host, so a side stream can't overtake it here; the clocks cover that direction. Slots are
filled with NaN when another unit takes them over. Rejected: random orders alone, which find a missing wait only if
compute happens to read in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum

from zeroshard.engine.core.streams import (
    Buffers,
    Entry,
    Event,
    HostWaiter,
    Launch,
    QueuedStreams,
    QueueEvent,
    Stream,
    Work,
)

Clock = dict[Stream, int]


class Pace(Enum):
    """How far queues move when nothing forces them."""

    EAGER = "eager"
    LAZY = "lazy"
    MIXED = "mixed"


class HazardError(AssertionError):
    """Two accesses to one buffer that no event orders."""


class ClockedEvent(QueueEvent):
    """A queue's marker with what its stream had seen when it was recorded."""

    __slots__ = ("clock",)

    def __init__(self, inner: QueueEvent, clock: Clock) -> None:
        super().__init__(inner.stream, inner.done)
        self.clock = clock


@dataclass
class _Accesses:
    writer: tuple[Stream, int] | None = None
    readers: dict[Stream, int] = field(default_factory=dict)


class VirtualStreams(QueuedStreams):
    """Queued streams under a pace, with hazard checks.

    Args:
        seed: for the pace MIXED; the ranks may use the same seed or different ones.
        drop_wait: whether to omit a wait of a stream for an event, to show that the checks notice it.
    """

    poisons = True

    def __init__(
        self,
        waiter: HostWaiter,
        *,
        pace: Pace = Pace.MIXED,
        seed: int = 0,
        drop_wait: Callable[[Stream, Event], bool] | None = None,
    ) -> None:
        super().__init__(waiter)
        self._pace = pace
        self._random = random.Random(seed)
        self._drop_wait = drop_wait
        self._clocks: dict[Stream, Clock] = {stream: dict.fromkeys(Stream, 0) for stream in Stream}
        self._accesses: dict[Hashable, _Accesses] = {}
        self.checked = 0
        """Accesses that were checked."""

    def launch(self, stream: Stream, fn: Launch, reads: Buffers = (), writes: Buffers = ()) -> None:
        self._access(stream, reads, writes)
        self._queues[stream].append(Entry((), launch=fn))
        self._maybe_advance()

    def enqueue(self, stream: Stream, fn: Work, reads: Buffers = (), writes: Buffers = ()) -> None:
        self._access(stream, reads, writes)
        self._queues[stream].append(Entry((), work=fn))
        self._maybe_advance()

    def touch(self, reads: Buffers = (), writes: Buffers = ()) -> None:
        self._access(Stream.COMPUTE, reads, writes)
        self._maybe_advance()

    def record(self, stream: Stream, name: Hashable = None) -> QueueEvent:
        event = ClockedEvent(QueueEvent(stream, True), dict(self._clocks[stream]))
        if stream is not Stream.COMPUTE and self._queues[stream]:
            event.done = False
            self._queues[stream].append(Entry(event=event))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, ClockedEvent)
        if self._drop_wait is not None and self._drop_wait(stream, event):
            return
        mine = self._clocks[stream]
        for other, time in event.clock.items():
            mine[other] = max(mine[other], time)
        super().wait(stream, event)

    def drain(self) -> None:
        for stream in self._queues:
            self.wait(Stream.COMPUTE, self.record(stream))

    def _maybe_advance(self) -> None:
        for stream in self._queues:
            if self._pace is Pace.EAGER or (self._pace is Pace.MIXED and self._random.random() < 0.5):
                self._advance(stream)

    def _access(self, stream: Stream, reads: Buffers, writes: Buffers) -> None:
        clock = self._clocks[stream]
        clock[stream] += 1
        for buffer in {*reads, *writes}:
            seen = self._accesses.setdefault(buffer, _Accesses())
            self.checked += 1
            self._ordered(clock, stream, buffer, seen.writer, "write")
            if buffer in writes:
                for reader, time in seen.readers.items():
                    self._ordered(clock, stream, buffer, (reader, time), "read")
        for buffer in reads:
            self._accesses[buffer].readers[stream] = clock[stream]
        for buffer in writes:
            self._accesses[buffer] = _Accesses(writer=(stream, clock[stream]))

    def _ordered(
        self, clock: Clock, stream: Stream, buffer: Hashable, access: tuple[Stream, int] | None, what: str
    ) -> None:
        if access is not None and access[0] is not stream and access[1] > clock[access[0]]:
            raise HazardError(
                f"{stream.name} uses buffer {buffer} and no event orders it after the {what} of {access[0].name}"
            )
