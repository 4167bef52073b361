"""State that rests off the device passes it in pieces, and is updated there by torch's operations.

    host, or a window of what is on disk   [ piece 0 | piece 1 | piece 2 | ... ]
    buffer 0     upload . update . download | piece 2: upload ...        each buffer has a stream of its own,
    buffer 1            upload . update . download | ...                 so both directions of the link are in use

The threads that update units call this; each returns when its region, or its window, is back where it rests. Two
buffers are for state in host memory and one is for state on disk, which another thread updates at the same time. Which
operations run on a piece is the caller's matter: they are those for state on the device, and so are the bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from zeroshard.optim.adam.streamed_adam import BufferCopies
from zeroshard.optim.regions import Region
from zeroshard.tiers import Row, RowInPlace

_FOR_DISK = 1


@dataclass(frozen=True)
class StateRow:
    """A row of a region's state, with one element for each `per` of the region's."""

    row: Row
    per: int = 1


PieceUpdate = Callable[[Region, Sequence[torch.Tensor]], None]
"""Updates a piece of a region, all on the device: the piece as a region, and the elements of its state rows."""


class Lane:
    """Buffers that pieces use in turns.

    Args:
        numel: elements of a piece, about: whole blocks where moments are kept in blocks.
    """

    def __init__(self, device: torch.device, buffers: Sequence[torch.Tensor], numel: int) -> None:
        streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in buffers]
        self._turns = list(zip(buffers, streams, strict=True))
        self._numel = numel
        self._lock = threading.Lock()

    def through(self, region: Region, state: Sequence[StateRow], update: PieceUpdate) -> None:
        """Update a region piece by piece; returns when all of it is back.

        Raises:
            SpillError: its state is on a disk that failed.
        """
        step = self._numel if region.blocks is None else region.blocks.whole(self._numel)
        numel = region.master.numel()
        with self._lock:
            for turn, low in enumerate(range(0, numel, step)):
                buffer, stream = self._turns[turn % len(self._turns)]
                with _on(stream):
                    _pass(region, slice(low, min(low + step, numel)), state, update, buffer)
            for _, stream in self._turns:
                if stream is not None:
                    stream.synchronize()


class Passage:
    """The lanes of state in host memory and of windows of state on disk, which may be used at the same time.

    Args:
        buffers: device memory, uint8, of the plan's sizes.
    """

    def __init__(self, device: torch.device, buffers: Sequence[torch.Tensor], numel: int) -> None:
        self.in_memory = Lane(device, buffers[:-_FOR_DISK], numel)
        self.in_windows = Lane(device, buffers[-_FOR_DISK:], numel)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _pass(region: Region, cut: slice, state: Sequence[StateRow], update: PieceUpdate, buffer: torch.Tensor) -> None:
    """Upload elements `cut` of a region, update them and download them, in the order of the current stream."""
    copies, grad, away = BufferCopies(buffer), region.grad()[cut], region.off_device
    moved: list[tuple[str | int, Row, slice]] = [
        (number, one.row, slice(cut.start // one.per, cut.stop // one.per)) for number, one in enumerate(state)
    ]
    if "master" in away:
        moved.append(("master", region.master_row if region.master.is_meta else RowInPlace(region.master), cut))
    if region.param is not None and "param" in away:
        moved.append(("param", RowInPlace(region.param), cut))
    if "grad" in away:
        moved.append(("grad", RowInPlace(region.grad()), cut))
    places: dict[str | int, torch.Tensor] = {}
    for name, row, part in sorted(moved, key=lambda one: -one[1].dtype.itemsize):
        places[name] = copies.reserve(part, row.dtype) if name == "grad" else copies.add(row, part)
    copies.upload()
    if "grad" in places:
        grad = places["grad"].copy_(grad, non_blocking=True)
    param = None if region.param is None else places.get("param", region.param[cut])
    master = places["master"] if "master" in places else region.master[cut]
    piece = replace(
        region,
        master=master,
        param=param,
        grad=lambda: grad,
        start=region.start + cut.start,
        allocate=None,
        row=None,
        window=None,
    )
    update(piece, [places[number] for number in range(len(state))])
    copies.download()
