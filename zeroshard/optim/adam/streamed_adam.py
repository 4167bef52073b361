"""Adam on state that rests in host memory: it is copied to the device piece by piece, updated there and copied back.

    host     master m v gradient  [ piece 0 | piece 1 | piece 2 | ... ]
                                       |  upload     ^  download (all but the gradient)
    device   buffer 0, 1, 2            +--> kernel --+--> parameters in compute dtype, which rest on the device

The kernel, its table of scalars and its arithmetic are the same as for state on the device, and so are the bits of the
result. What the plan keeps on the device (float32 parameters; accumulated gradients) is used there. The engine decides
when, and on which streams, pieces are copied and updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zeroshard.optim.adam.device_adam import DeviceAdam
from zeroshard.optim.kernels.tiles import tile_table
from zeroshard.optim.regions import Region
from zeroshard.optim.rules import Rule
from zeroshard.tiers import Row, RowInPlace, finish


@dataclass(frozen=True)
class StatePiece:
    """A part of a region's state that passes through a device buffer; its three functions are called in this order."""

    buffer: int
    upload: Callable[[], None]
    update: Callable[[], None]
    download: Callable[[], None]


class StreamedAdam(DeviceAdam):
    """The update of all regions of this rank, some of which have their state in host memory.

    Args:
        buffers: device memory, uint8, which the pieces use in turns.
        numel: elements of a piece.
    """

    def __init__(
        self, rule: Rule, regions: Sequence[Region], device: torch.device, buffers: Sequence[torch.Tensor], numel: int
    ) -> None:
        super().__init__(rule, regions, device)
        self.buffers = buffers
        self._device = device
        self._pieces = [
            [self._piece(number, low, numel) for low in range(0, region.master.numel(), numel)]
            if region.allocate is not None
            else []
            for number, region in enumerate(regions)
        ]

    def pieces(self, number: int) -> Sequence[StatePiece]:
        """How to update region `number` with the prepared table; empty if its state is on the device (use `apply`)."""
        return self._pieces[number]

    def _piece(self, number: int, low: int, numel: int) -> StatePiece:
        region, (first, second) = self.regions[number], self._state[number]
        cut = slice(low, min(low + numel, region.master.numel()))
        turn = low // numel % len(self.buffers)
        copies = BufferCopies(self.buffers[turn])
        moments = [copies.add(state, cut) for state in (first, second)]
        master = copies.add(region.master_row, cut) if "master" in region.off_device else region.master[cut]
        param = None if region.param is None else region.param[cut]
        if region.param is not None and "param" in region.off_device:
            # It is uploaded, too, though the update only writes it: after a skipped step it is downloaded unchanged.
            param = copies.add(RowInPlace(region.param), cut)
        landing = copies.reserve(cut, region.grad().dtype) if "grad" in region.off_device else None
        tiles = tile_table(region.layout.pieces(region.start + cut.start, region.start + cut.stop), self._device)
        rows = self._rows[region.first_flag : region.first_flag + len(region.layout.segments)]
        decoupled = bool(self._rule.defaults["decoupled"])

        def upload() -> None:
            copies.upload()
            if landing is not None:
                landing.copy_(region.grad()[cut], non_blocking=True)

        def update() -> None:
            grad = region.grad()[cut] if landing is None else landing
            self._run(master, param, grad, moments[0], moments[1], tiles, rows, decoupled=decoupled)

        return StatePiece(turn, upload, update, copies.download)


class BufferCopies:
    """The copies of one piece: which rows, from which element on, and where their elements are in the buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._used = 0
        self._moves: list[tuple[Row, int, torch.Tensor]] = []

    def add(self, row: Row, cut: slice) -> torch.Tensor:
        """Reserve a place in the buffer for a row's elements, which are uploaded to it and downloaded from it."""
        place = self.reserve(cut, row.dtype)
        self._moves.append((row, cut.start, place))
        return place

    def reserve(self, cut: slice, dtype: torch.dtype) -> torch.Tensor:
        """Reserve the next place in the buffer for so many elements; it is not copied."""
        nbytes = (cut.stop - cut.start) * dtype.itemsize
        place = self._buffer[self._used : self._used + nbytes].view(dtype)
        self._used += nbytes
        return place

    def upload(self) -> None:
        """Copy all rows' elements to the device."""
        for arrived in [row.read(start, place) for row, start, place in self._moves]:
            finish(arrived)

    def download(self) -> None:
        """Copy all rows' elements back."""
        for left in [row.write(start, place) for row, start, place in self._moves]:
            finish(left)
