"""The checking backend: the engine's own operations on a CPU, with streams that run as late, as early or as mixed as
the events allow, and a proof that no order can hurt.

Two checks at once:

    order      what is launched on a side stream sits in its queue; a schedule decides how far queues move on each call.
               Only an awaited event forces them on. A result that depends on luck differs between schedules.
    hazards    every stream carries a vector clock; events copy it, waits join it. An access to a buffer that is not
               ordered after the last conflicting access is a race, whatever order this run happened to take.

Compute itself runs at once on the host, so a side stream can't overtake it here; the clocks cover that direction.
Slots are poisoned with NaN when another unit takes them over. Rejected: random orders alone, which find a missing wait
only when compute happens to read in between.
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
        seed: of the pace MIXED; equal on all ranks or not, both must work.
        drop_wait: whether to leave out a wait of a stream for an event, to show that the checks would notice.
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
