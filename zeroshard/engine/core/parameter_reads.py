"""Prefetches parameters from disk for the gathers: one thread reads them ahead into windows of host memory.

    lists      READ 2        GATHER 1          READ 3        GATHER 2
    reader     [ read 2 into window 2     ]    [ read 3 into window 0     ]
    gather                   copy of window 1                copy of window 2, as soon as it is there

A window holds the shards of one unit, of any unit. The reader overwrites a window only after its content was copied to
the device, and reads a unit only after the pending update of that unit. One reader thread is enough: the requests for
one shard keep a disk busy. Rejected: reading inside of the gather, which leaves the disk idle while compute is issued;
a fixed window per unit, as with slots, which is not needed because nothing keeps addresses in a window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from zeroshard.engine.core.disk_failures import Report, disk_failures_to
from zeroshard.engine.core.pending_updates import PendingUpdates
from zeroshard.engine.core.streams import Event, Streams
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.unit import Unit
from zeroshard.errors import SpillError
from zeroshard.nvme.transfers import in_blocks
from zeroshard.plan.legs import Stream
from zeroshard.tiers import Row, finish


class ParameterReads:
    """What is being read, and where it arrives. All calls come from the thread that runs the lists.

    Args:
        windows: host memory, each part as large as the largest unit's shards in whole blocks.
        updates: updates that are under way beside compute.
        report_failure: reports a disk that failed to all ranks.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        windows: Sequence[torch.Tensor],
        streams: Streams,
        updates: PendingUpdates,
        report_failure: Report | None,
    ) -> None:
        self._units, self._windows, self._streams = units, windows, streams
        self._updates, self._report_failure = updates, report_failure
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="zeroshard-read") if windows else None
        self._least_recent = deque(range(len(windows)))
        self._window: dict[int, int] = {}
        self._arriving: dict[int, Future[None]] = {}
        self._begun: set[int] = set()
        """Units whose reads have begun and that have not been gathered since."""
        self._copied: dict[int, Event] = {}
        """By window, the event after which it may be written again."""
        self._last: Future[None] | None = None

    def begin(self, index: int) -> None:
        """Read a unit into the next window, unless that has begun already."""
        if index in self._begun:
            return
        assert self._reader is not None
        ready = [self._updates.wait_for_end_of(index)]
        before = self._window.get(index)
        window = self._next_window()
        # Write after read: a window must not change until its content has been copied to the device. A copy of this
        # unit that has not run yet looks up its window by the unit, so that window has to be waited for, too.
        for occupied in {window, window if before is None else before}:
            if occupied in self._copied:
                ready.append(self._streams.arrival(self._copied.pop(occupied)))
        self._window[index] = window
        self._begun.add(index)
        self._last = self._arriving[index] = self._reader.submit(self._read, index, window, ready)

    def _next_window(self) -> int:
        """The least recently used window, if possible one whose unit has been gathered since."""
        occupied = {self._window[index]: index for index in self._begun}
        window = next((turn for turn in self._least_recent if turn not in occupied), self._least_recent[0])
        if window in occupied:
            self._begun.discard(occupied[window])
        self._least_recent.remove(window)
        self._least_recent.append(window)
        return window

    def _read(self, index: int, window: int, ready: Sequence[Callable[[], object] | None]) -> None:
        """On the reader's thread."""
        for arrival in ready:
            finish(arrival)
        begun = [row.read(0, self._part(window, index, group)) for group, row in _on_disk(self._units[index])]
        failure: SpillError | None = None
        for shard_in_window in begun:
            try:
                finish(shard_in_window)
            except SpillError as error:  # the window is in use until all reads have ended
                failure = failure or error
        if failure is not None:
            raise failure

    def _part(self, window: int, index: int, group: Group) -> torch.Tensor:
        """A group's place in a window."""
        used = 0
        for other, row in _on_disk(self._units[index]):
            nbytes = row.numel * row.dtype.itemsize
            if other is group:
                return self._windows[window][used : used + nbytes].view(row.dtype)
            used += in_blocks(nbytes)
        raise AssertionError("a group that does not rest on disk")

    def wait_for(self, index: int) -> None:
        """Wait until a unit has been read. Raises SpillError, after reporting it to all ranks."""
        with disk_failures_to(self._report_failure):
            self._arriving[index].result()

    def shard_in_window(self, index: int, group: Group) -> torch.Tensor:
        """A group's shard in host memory; valid after `wait_for` and until the copy to the device has run."""
        return self._part(self._window[index], index, group)

    def mark_copied(self, index: int) -> None:
        """The gather that copies a unit to the device has been issued."""
        self._begun.discard(index)
        self._copied[self._window[index]] = self._streams.record(Stream.GATHER, ("window", self._window[index]))

    def drop(self) -> None:
        """Discard what was read ahead, since the parameters are about to be written. Waits for the reader."""
        self._begun.clear()
        self.wait_for_reader()

    def wait_for_reader(self) -> None:
        """Wait for the reader."""
        if self._last is not None:
            self._last.exception()  # an error of a read that no gather needs is ignored
            self._last = None


def _on_disk(unit: Unit) -> list[tuple[Group, Row]]:
    return [(group, group.row) for group in unit.groups if group.row is not None]
