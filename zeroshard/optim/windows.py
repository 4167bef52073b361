"""Windows: host memory in which state on disk is updated, piece by piece: read ahead, update, write behind.

    disk       region 0: m v master | region 1: ...       each region in pieces of as many elements as the plan says
    windows    [ piece 3 is read ] [ piece 2 is updated ] [ piece 1 is written ]      three, used in turns

    read     0   1   2   3   4                 piece k + 1 is read while piece k is updated, if piece k - 2, whose
    update       0   1   2   3   4             window it uses, is on disk again
    write            0   1   2   3   4         after the last piece a step waits until all are written

The order of a step's regions is known at its begin, so the next region is read ahead, too. A piece is passed on as a
region: updates are element-wise, so the division changes no bits. Regions whose state is in memory are not divided.
Parameters on disk are written from the window, too, and must be on disk when their region has been updated, since
gathers read them. Rejected: memory-mapped files, for which the system decides what is in memory; a window as large as a
unit, which grows with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from zeroshard.nvme.transfers import in_blocks
from zeroshard.optim.regions import Region
from zeroshard.plan.offload import WINDOWS
from zeroshard.tiers import Completion, Row, finish, values_of

RegionTensors = tuple[Region, Sequence[torch.Tensor]]
"""A region and its state, as tensors in memory."""


@dataclass(frozen=True)
class _Piece:
    """Elements [low, high) of a region."""

    region: int
    low: int
    high: int


@dataclass(frozen=True)
class _Place:
    """The elements of a piece in one row.

    Attributes:
        at: where they begin in the row.
        values: these elements in memory: those of the row itself, or of the window.
        read: whether the update needs their old values.
    """

    row: Row
    at: int
    values: torch.Tensor
    read: bool = True

    @property
    def moved(self) -> bool:
        return self.row.values is None


class Windows:
    """Provides regions and their state as tensors in memory.

    Regions that are not in memory are opened by one thread, in the order that `begin` got.

    Args:
        states: the rows of each region's state.
        per: for how many elements of a region each row of its state has one; None for one each. Regions with blocks
            are divided into pieces of whole blocks.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        states: Sequence[Sequence[Row]],
        per: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._regions, self._rows = regions, states
        self._per = [[1] * len(rows) for rows in states] if per is None else per
        self._tensors = {
            number: (region, [values_of(row) for row in states[number]])
            for number, region in enumerate(regions)
            if region.window is None and all(row.values is not None for row in states[number])
        }
        self._pieces: list[_Piece] = []
        self._started, self._finished = 0, 0
        self._reads: dict[int, list[Completion | None]] = {}
        self._writes: dict[int, list[Completion | None]] = {}
        self._failure: BaseException | None = None

    def begin(self, numbers: Sequence[int]) -> None:
        """A step begins, which opens these regions in this order; starts to read the first state."""
        self._raise_failure()
        assert self._finished == len(self._pieces), "a step begins before the one before it has ended"
        self._pieces = [piece for number in numbers for piece in self._cut(number)]
        self._started = self._finished = 0
        try:
            self._start_reads(WINDOWS - 2)
        except BaseException as error:
            self._failure = error
            raise

    def open(self, number: int) -> Iterator[RegionTensors]:
        """Yield a region with its state, or its pieces one after the other; each is written back before the next.

        Raises:
            SpillError: the disk failed, now or earlier. State is lost then, so every later call raises it, too.
        """
        whole = self._tensors.get(number)
        if whole is not None:
            yield whole
            return
        self._raise_failure()
        try:
            for piece in self._cut(number):
                assert self._pieces[self._finished] == piece, "regions are opened in the order that the step began with"
                yield self._wait_for_piece(piece)
                self._write_back()
            if self._regions[number].gathers_read_row:
                self._start_reads(self._finished + WINDOWS - 2)
                self._wait_for_all_writes()
        except BaseException as error:  # also if the update failed: some of the state is a step ahead then
            self._failure = self._failure or error
            raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _cut(self, number: int) -> list[_Piece]:
        region = self._regions[number]
        if region.window is None:
            return []
        numel, step = region.master.numel(), region.window_numel
        step = step if region.blocks is None else region.blocks.whole(step)
        return [_Piece(number, low, min(low + step, numel)) for low in range(0, numel, step)]

    def _wait_for_piece(self, piece: _Piece) -> RegionTensors:
        """Start to read the next piece, and wait for this one; returns its state in its window."""
        self._start_reads(self._finished + WINDOWS - 2)
        for arrived in self._reads.pop(self._finished):
            finish(arrived)
        places = [place.values for place in self._places(self._finished)]
        region, cut = self._regions[piece.region], slice(piece.low, piece.high)
        param = None if region.param is None else region.param[cut]
        if region.param_row is not None:
            param = places.pop()
        master = region.master[cut] if region.row is None else places.pop()
        opened = replace(
            region, master=master, param=param, grad=lambda: region.grad()[cut], start=region.start + piece.low
        )
        if region.param_row is not None:
            opened.clear_padding()
        return opened, places

    def _write_back(self) -> None:
        places = self._places(self._finished)
        self._writes[self._finished % WINDOWS] = [one.row.write(one.at, one.values) for one in places if one.moved]
        self._finished += 1
        if self._finished == len(self._pieces):
            self._wait_for_all_writes()

    def _start_reads(self, last: int) -> None:
        """Start to read the pieces up to number `last`, each when its window is free."""
        while self._started < min(last + 1, len(self._pieces)):
            self._wait_for_writes(self._started % WINDOWS)
            places = [one for one in self._places(self._started) if one.moved and one.read]
            self._reads[self._started] = [one.row.read(one.at, one.values) for one in places]
            self._started += 1

    def _wait_for_all_writes(self) -> None:
        for turn in range(WINDOWS):
            self._wait_for_writes(turn)

    def _wait_for_writes(self, turn: int) -> None:
        for left in self._writes.pop(turn, ()):
            finish(left)

    def _places(self, number: int) -> list[_Place]:
        """A piece's state, then master weights and parameters that are not in memory, each in whole disk blocks."""
        piece = self._pieces[number]
        region, rows = self._regions[piece.region], self._rows[piece.region]
        assert region.window is not None
        size = region.window.numel() // WINDOWS
        used, found = number % WINDOWS * size, list[_Place]()
        for row, per in zip((*rows, region.row, region.param_row), (*self._per[piece.region], 1, 1), strict=True):
            if row is None:
                continue
            low, high = piece.low // per, piece.high // per
            if row.values is not None:
                found.append(_Place(row, low, row.values[low:high]))
                continue
            nbytes = (high - low) * row.dtype.itemsize
            values = region.window[used : used + nbytes].view(row.dtype)
            found.append(_Place(row, low, values, read=row is not region.param_row))
            used += in_blocks(nbytes)
        return found
