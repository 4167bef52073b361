"""Streams: compute, all-gather and reduce-scatter overlap; events order them where one depends on another.

The engine uses this small interface, so that the same operations run on CUDA streams, on a CPU (where a stream is a
queue of pending collectives and other work), and under the checking backend of `virtual_streams`.

    launch(stream, fn)      start a collective in stream order
    enqueue(stream, fn)     run fn, which sends nothing, in stream order
    record(stream) -> e     a point in the stream's order; under a name, the last point of that name replaces the others
    wait(stream, e)         what is launched on `stream` later runs after e
    touch(reads, writes)    compute uses buffers here (only the checking backend looks)

`reads` and `writes` name buffers. Rejected: calling torch.cuda directly in the engine; races hide on GPUs, and nothing
could then be checked where there is none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, cast

import torch

from zeroshard.comm.collectives import Pending
from zeroshard.plan.legs import Stream

Buffers = tuple[Hashable, ...]
Launch = Callable[[], Pending]
Work = Callable[[], object]


class Step(NamedTuple):
    """One element of a list for `run`: a collective to launch (`sends`), or work to enqueue."""

    fn: Launch | Work
    reads: Buffers = ()
    writes: Buffers = ()
    sends: bool = False


SIDE = tuple(stream for stream in Stream if stream is not Stream.COMPUTE)


class Event(Protocol):
    """A point in a stream's order; opaque to the engine."""


class WaitTimer(Protocol):
    """Times waits of compute on a device (`zeroshard.observe.device_waits`); asked only while `active`."""

    active: bool

    def waiting(self, stream: Stream) -> AbstractContextManager[None]:
        """Around a wait for an event of `stream`."""
        ...


class Streams(Protocol):
    """The streams of a device, as the engine uses them.

    Attributes:
        poisons: whether slots are filled with NaN when their content is out of date (checking backends).
    """

    poisons: bool

    def launch(self, stream: Stream, fn: Launch, reads: Buffers = (), writes: Buffers = ()) -> None: ...

    def enqueue(self, stream: Stream, fn: Work, reads: Buffers = (), writes: Buffers = ()) -> None: ...

    def run(self, stream: Stream, steps: Sequence[Step]) -> None:
        """Launch or enqueue several steps at once, which costs less host time."""
        ...

    def record(self, stream: Stream, name: Hashable = None) -> Event:
        """A point in the stream's order. Of one `name` only the last point may be waited for; None is always new."""
        ...

    def wait(self, stream: Stream, event: Event) -> None: ...

    def touch(self, reads: Buffers = (), writes: Buffers = ()) -> None: ...

    def adopt_current_stream(self) -> None:
        """A pass or step begins: compute is the stream that the caller runs on from here."""
        ...

    def drain(self) -> None:
        """Compute, and on a CPU the host, waits for everything launched so far."""
        ...

    def arrival(self, event: Event) -> Callable[[], object]:
        """A function that waits, on any thread, for an event of a side stream."""
        ...

    def wait_on_host(self) -> None:
        """Let the host wait for everything that compute waits for so far; it is about to read host memory."""
        ...

    def time_waits(self, timer: WaitTimer) -> None:
        """Have compute's waits on a device timed. On a CPU the host waits, which `comm.watchdog` tells."""
        ...


class CudaEvent(torch.cuda.Event):
    """A CUDA event that knows the epoch and the stream in which it was recorded."""

    epoch: int = 0
    stream: Stream = Stream.COMPUTE


class CudaStreams:
    """CUDA streams and events. Collectives are issued on the side streams; nothing here blocks the host.

    A CUDA graph of a step is captured from these streams. Events from inside a graph can't be used outside of it, and
    the other way round. So time is divided into epochs, and all streams wait for each other between two epochs: then
    everything before an event of an earlier epoch has happened for every stream, and no wait is needed.

        eager work | all streams wait | captured work, streams fork from compute and join it | all wait | eager work
    """

    poisons = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._epoch = 0
        self._compute = torch.cuda.current_stream(device)
        self._side = {stream: torch.cuda.Stream(device, priority=-1) for stream in SIDE}
        self._events: dict[tuple[Stream, Hashable], CudaEvent] = {}
        self._timer: WaitTimer | None = None

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        return self._compute if stream is Stream.COMPUTE else self._side[stream]

    def adopt_current_stream(self) -> None:
        # Looked up once per pass, since the look-up costs as much as a kernel launch. Autograd runs a backward on the
        # stream of its forward.
        self._compute = torch.cuda.current_stream(self._device)

    def launch(self, stream: Stream, fn: Launch, reads: Buffers = (), writes: Buffers = ()) -> None:
        self._issue(stream, (fn,))

    def enqueue(self, stream: Stream, fn: Work, reads: Buffers = (), writes: Buffers = ()) -> None:
        self._issue(stream, (fn,))

    def run(self, stream: Stream, steps: Sequence[Step]) -> None:
        self._issue(stream, [step.fn for step in steps])

    def _issue(self, stream: Stream, fns: Sequence[Launch | Work]) -> None:
        side = self._side[stream]
        # Set and reset directly: torch's context manager looks up the current stream, which costs more than a launch.
        torch.cuda.set_stream(side)
        try:
            for fn in fns:
                pending = fn()
                if isinstance(pending, Pending):
                    pending.finish()  # orders this stream after the collective; the host does not wait
                    pending.mark(side)
        finally:
            torch.cuda.set_stream(self._compute)

    def record(self, stream: Stream, name: Hashable = None) -> CudaEvent:
        event = None if name is None else self._events.get((stream, name))
        if event is None:
            event = CudaEvent()
            event.stream = stream
            if name is not None:
                self._events[stream, name] = event
        event.record(self._stream(stream))
        event.epoch = self._epoch
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        if event.epoch != self._epoch:
            return
        timer = self._timer
        if timer is None or not timer.active or stream is not Stream.COMPUTE:
            self._stream(stream).wait_event(event)
            return
        with timer.waiting(event.stream):
            self._compute.wait_event(event)

    def begin_epoch(self) -> None:
        """Begin an epoch: compute, the caller's stream, waits for all streams, and all of them for compute."""
        self.adopt_current_stream()
        self.drain()
        self.begin_epoch_after_compute()

    def begin_epoch_after_compute(self) -> None:
        """Begin an epoch in which all streams come after what compute has been given so far."""
        self._epoch += 1
        self._events = {}  # an event that a graph has captured is recorded there alone
        for side in self._side.values():
            side.wait_stream(self._compute)

    def touch(self, reads: Buffers = (), writes: Buffers = ()) -> None:
        pass

    def drain(self) -> None:
        for side in self._side.values():
            torch.cuda.current_stream(self._device).wait_stream(side)

    def arrival(self, event: Event) -> Callable[[], object]:
        assert isinstance(event, torch.cuda.Event)
        return event.synchronize

    def wait_on_host(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def time_waits(self, timer: WaitTimer) -> None:
        self._timer = timer


class QueueEvent:
    """A marker in a queue; `done` once everything before it has run."""

    __slots__ = ("done", "stream")

    def __init__(self, stream: Stream, done: bool) -> None:
        self.stream = stream
        self.done = done


class HostWaiter(Protocol):
    """How the host waits for a collective (see comm.waiting)."""

    def waiting(self, pending: Pending) -> AbstractContextManager[None]: ...

    def wait_up_to(self, pending: Pending, seconds: float) -> bool: ...


class Entry:
    """What a queue holds: a running collective, a collective or other work that has not started, or a marker."""

    __slots__ = ("buffers", "event", "launch", "pending", "work")

    def __init__(
        self,
        buffers: Buffers = (),
        *,
        pending: Pending | None = None,
        launch: Launch | None = None,
        work: Work | None = None,
        event: QueueEvent | None = None,
    ) -> None:
        self.buffers = buffers
        self.pending, self.launch, self.work, self.event = pending, launch, work, event


class QueuedStreams:
    """Streams on a CPU: collectives run on the process group's threads, and later work waits in a queue.

    A collective starts at once, because peers may be waiting for it, unless it uses a buffer that an entry of its queue
    still uses, or an earlier collective is still held back: all ranks must start them in the same order. A queue
    advances when its first entry has finished, which every call checks; a waiting host keeps advancing all queues.
    """

    poisons = False

    def __init__(self, waiter: HostWaiter) -> None:
        self._waiter = waiter
        self._queues: dict[Stream, deque[Entry]] = {stream: deque() for stream in SIDE}

    def launch(self, stream: Stream, fn: Launch, reads: Buffers = (), writes: Buffers = ()) -> None:
        queue, buffers = self._queues[stream], (*reads, *writes)
        self._advance(stream)
        if any(self._holds_back(entry, buffers, stream) for entry in queue):
            queue.append(Entry(buffers, launch=fn))
        else:
            queue.append(Entry(buffers, pending=fn()))

    def enqueue(self, stream: Stream, fn: Work, reads: Buffers = (), writes: Buffers = ()) -> None:
        self._queues[stream].append(Entry((*reads, *writes), work=fn))
        self._advance(stream)

    def run(self, stream: Stream, steps: Sequence[Step]) -> None:
        for fn, reads, writes, sends in steps:
            if sends:
                self.launch(stream, cast(Launch, fn), reads, writes)
            else:
                self.enqueue(stream, fn, reads, writes)

    def record(self, stream: Stream, name: Hashable = None) -> QueueEvent:
        if stream is Stream.COMPUTE or not self._queues[stream]:
            return QueueEvent(stream, True)
        event = QueueEvent(stream, False)
        self._queues[stream].append(Entry(event=event))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, QueueEvent)
        if event.done:
            return
        if stream is Stream.COMPUTE:
            self._block(event)
        elif stream is not event.stream:  # a stream runs in order, so it need not wait for its own events
            self._queues[stream].append(Entry(event=event))

    def touch(self, reads: Buffers = (), writes: Buffers = ()) -> None:
        pass

    def adopt_current_stream(self) -> None:
        pass

    def drain(self) -> None:
        for stream in self._queues:
            self.wait(Stream.COMPUTE, self.record(stream))

    def arrival(self, event: Event) -> Callable[[], object]:
        self.wait(Stream.COMPUTE, event)  # queues advance on this thread only
        return lambda: None

    def wait_on_host(self) -> None:
        pass  # here compute is the host

    def time_waits(self, timer: WaitTimer) -> None:
        pass  # the host waits, and the watchdog tells for what

    @staticmethod
    def _holds_back(entry: Entry, buffers: Buffers, stream: Stream) -> bool:
        if entry.launch is not None or (entry.event is not None and entry.event.stream is not stream):
            return True
        return any(buffer in buffers for buffer in entry.buffers)

    def _advance(self, stream: Stream) -> bool:
        """Run the entries that can run without waiting; returns whether there were any."""
        queue, moved = self._queues[stream], False
        while queue and self._step(queue, stream):
            moved = True
        return moved

    def _step(self, queue: deque[Entry], stream: Stream) -> bool:
        head = queue[0]
        if head.launch is not None:
            head.pending, head.launch = head.launch(), None
            return True
        if head.pending is not None:
            if not head.pending.is_completed():
                return False
            self._waiter.wait_up_to(head.pending, 0.0)  # raises what went wrong in it
        elif head.work is not None:
            head.work()
        elif head.event is not None:
            if head.event.stream is not stream and not head.event.done:
                return False
            head.event.done = True
        queue.popleft()
        return True

    def _block(self, event: QueueEvent) -> None:
        while not event.done:
            moved = [self._advance(stream) for stream in self._queues]
            if event.done or any(moved):
                continue
            pending = self._queues[event.stream][0].pending
            if pending is not None:
                with self._waiter.waiting(pending):
                    self._wait_for_collective(pending)
            else:
                time.sleep(0.0001)

    def _wait_for_collective(self, pending: Pending) -> None:
        """Wait for one collective, and advance the other queues meanwhile."""
        others_busy = sum(1 for queue in self._queues.values() if queue) > 1
        while not self._waiter.wait_up_to(pending, 0.0005 if others_busy else 0.2):
            for stream, queue in self._queues.items():
                if queue and queue[0].pending is not pending:
                    self._advance(stream)
