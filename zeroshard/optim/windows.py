"""Host memory through which state on disk passes for its update: read ahead, update, write behind, piece by piece.

    disk       region 0: m v master | region 1: ...       each region in pieces of as many elements as the plan says
    windows    [ piece 3 arrives ] [ piece 2 is updated ] [ piece 1 goes back ]      three, in turns

    read     0   1   2   3   4                 piece k + 1 is read while piece k is updated, if piece k - 2, whose
    update       0   1   2   3   4             window it takes, is on disk again
    write            0   1   2   3   4         the last piece of a step waits until all of them are

The order of a step's regions is known when it begins, so reading ahead goes on from one region to the next. A piece is
a region of its own: updates are element-wise, so cutting changes no bits. Regions whose state lies in place are given
as they are. Parameters that rest on disk are written from the window too, and are there when their region has been
updated, for gathers read them. Rejected: tensors mapped from files, of which the system decides what is in memory; a
window as large as a unit, which grows with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from zeroshard.nvme.transfers import in_blocks
from zeroshard.optim.regions import Region
from zeroshard.plan.offload import WINDOWS
from zeroshard.tiers import Completion, Row, finish, values_of

Opened = tuple[Region, Sequence[torch.Tensor]]
"""A region and its state, as tensors that can be computed on."""


@dataclass(frozen=True)
class _Piece:
    """Elements [low, high) of a region."""

    region: int
    low: int
    high: int


@dataclass(frozen=True)
class _Place:
    """The elements of a piece in one row: where they lie, or in its window.

    Attributes:
        read: their old values are needed.
    """

    row: Row
    values: torch.Tensor
    read: bool = True

    @property
    def moved(self) -> bool:
        return self.row.values is None


class Windows:
    """Gives regions and their state as tensors, where the processor can work on them.

    Args:
        states: the rows of each region's state.

    Moved regions are opened by one thread, in the order that `begin` was told.
    """

    def __init__(self, regions: Sequence[Region], states: Sequence[Sequence[Row]]) -> None:
        self._regions, self._rows = regions, states
        self._in_place = {
            number: (region, [values_of(row) for row in states[number]])
            for number, region in enumerate(regions)
            if region.window is None
        }
        self._pieces: list[_Piece] = []
        self._read, self._done = 0, 0
        self._arriving: dict[int, list[Completion | None]] = {}
        self._leaving: dict[int, list[Completion | None]] = {}
        self._failure: BaseException | None = None

    def begin(self, numbers: Sequence[int]) -> None:
        """A step opens these regions, in this order: the first state is read from here on."""
        self._check()
        assert self._done == len(self._pieces), "a step begins before the one before it has ended"
        self._pieces = [piece for number in numbers for piece in self._cut(number)]
        self._read = self._done = 0
        try:
            self._read_up_to(WINDOWS - 2)
        except BaseException as error:
            self._failure = error
            raise

    def open(self, number: int) -> Iterator[Opened]:
        """A region with its state, or one after the other its pieces; each is put back when the next is asked for.

        Raises:
            SpillError: the disk failed, now or before. State is lost then, so every later call raises it too.
        """
        whole = self._in_place.get(number)
        if whole is not None:
            yield whole
            return
        self._check()
        try:
            for piece in self._cut(number):
                assert self._pieces[self._done] == piece, "regions are opened in the order that the step began with"
                yield self._arrive(piece)
                self._put_back()
            if self._regions[number].read_elsewhere:
                self._read_up_to(self._done + WINDOWS - 2)
                self._wait_until_all_left()
        except BaseException as error:  # also where the update failed: some of the state is a step ahead
            self._failure = self._failure or error
            raise

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _cut(self, number: int) -> list[_Piece]:
        region = self._regions[number]
        if region.window is None:
            return []
        numel, step = region.master.numel(), region.window_numel
        return [_Piece(number, low, min(low + step, numel)) for low in range(0, numel, step)]

    def _arrive(self, piece: _Piece) -> Opened:
        """The piece's state in its window, while the next one is read."""
        self._read_up_to(self._done + WINDOWS - 2)
        for arrived in self._arriving.pop(self._done):
            finish(arrived)
        places = [place.values for place in self._places(self._done)]
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

    def _put_back(self) -> None:
        low, places = self._pieces[self._done].low, self._places(self._done)
        self._leaving[self._done % WINDOWS] = [one.row.write(low, one.values) for one in places if one.moved]
        self._done += 1
        if self._done == len(self._pieces):
            self._wait_until_all_left()

    def _read_up_to(self, last: int) -> None:
        """Begin to read the pieces up to number `last`, each as soon as its window is free."""
        while self._read < min(last + 1, len(self._pieces)):
            self._wait_until_left(self._read % WINDOWS)
            low = self._pieces[self._read].low
            places = [one for one in self._places(self._read) if one.moved and one.read]
            self._arriving[self._read] = [one.row.read(low, one.values) for one in places]
            self._read += 1

    def _wait_until_all_left(self) -> None:
        for turn in range(WINDOWS):
            self._wait_until_left(turn)

    def _wait_until_left(self, turn: int) -> None:
        for left in self._leaving.pop(turn, ()):
            finish(left)

    def _places(self, number: int) -> list[_Place]:
        """A piece's state, then what is moved of master and parameters; in whole blocks, so that none is copied."""
        piece = self._pieces[number]
        region, rows = self._regions[piece.region], self._rows[piece.region]
        assert region.window is not None
        size = region.window.numel() // WINDOWS
        used, found = number % WINDOWS * size, list[_Place]()
        for row in (*rows, region.row, region.param_row):
            if row is None:
                continue
            if row.values is not None:
                found.append(_Place(row, row.values[piece.low : piece.high]))
                continue
            nbytes = (piece.high - piece.low) * row.dtype.itemsize
            values = region.window[used : used + nbytes].view(row.dtype)
            found.append(_Place(row, values, read=row is not region.param_row))
            used += in_blocks(nbytes)
        return found
