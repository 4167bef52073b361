"""Parameters on disk, on their way to a gather: read ahead into windows of host memory, by a thread of their own.

    lists      READ 2        GATHER 1          READ 3        GATHER 2
    reader     [ read 2 into window 2     ]    [ read 3 into window 0     ]
    gather                   copy of window 1                copy of window 2, as soon as it is there

A window holds one unit's shards, whichever unit comes. It is written again after its copy to the device has been made,
and a unit is read after the update that is under way for it. One reader: the requests of one shard keep a disk busy.
Rejected: reading within the gather, where the disk would rest while compute is issued; windows that belong to units,
as slots do, for nothing keeps an address in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

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
        report_failure: lets all ranks know of a disk that failed.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        windows: Sequence[torch.Tensor],
        streams: Streams,
        updates: PendingUpdates,
        report_failure: Callable[[SpillError], None],
    ) -> None:
        self._units, self._windows, self._streams = units, windows, streams
        self._updates, self._report_failure = updates, report_failure
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="zeroshard-read") if windows else None
        self._least_recent = deque(range(len(windows)))
        self._window: dict[int, int] = {}
        self._arriving: dict[int, Future[None]] = {}
        self._begun: set[int] = set()
        """Units that have been read and that no gather has taken yet."""
        self._copied: dict[int, Event] = {}
        """The point after which a window may be written again."""
        self._last: Future[None] | None = None

    def begin(self, index: int) -> None:
        """Read a unit into the next window, unless that has begun already."""
        if index in self._begun:
            return
        assert self._reader is not None
        ready = [self._updates.wait_for_end_of(index)]
        before = self._window.get(index)
        window = self._next_window()
        # Write after read: a window belongs to its copy to the device until that has been made. And a copy of this unit
        # that has yet to be made finds its window by the unit.
        for occupied in {window, window if before is None else before}:
            if occupied in self._copied:
                ready.append(self._streams.arrival(self._copied.pop(occupied)))
        self._window[index] = window
        self._begun.add(index)
        self._last = self._arriving[index] = self._reader.submit(self._read, index, window, ready)

    def _next_window(self) -> int:
        """The least recently used window; a window whose unit no gather has taken only where all windows hold such units."""
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
            except SpillError as error:  # the window stays until all have ended
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
        """Wait for a unit, on the way of its gather. Raises SpillError, which the other ranks are told."""
        try:
            self._arriving[index].result()
        except SpillError as error:
            self._report_failure(error)
            raise

    def shard_in_window(self, index: int, group: Group) -> torch.Tensor:
        """A group's shard in host memory, after `wait_for` and until the copy has been made."""
        return self._part(self._window[index], index, group)

    def mark_copied(self, index: int) -> None:
        """The gather that copies a unit to the device has been issued."""
        self._begun.discard(index)
        self._copied[self._window[index]] = self._streams.record(Stream.GATHER, ("window", self._window[index]))

    def drop(self) -> None:
        """Parameters are about to be written: what was read ahead is out of date. Waits for the reader."""
        self._begun.clear()
        self.wait_for_reader()

    def wait_for_reader(self) -> None:
        """Wait for the reader."""
        if self._last is not None:
            self._last.exception()  # of a read that nobody needs
            self._last = None


def _on_disk(unit: Unit) -> list[tuple[Group, Row]]:
    return [(group, group.row) for group in unit.groups if group.row is not None]
