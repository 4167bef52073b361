"""Adam on state that rests in host memory and passes through the device, piece by piece, to be updated there.

    host     master m v gradient  [ piece 0 | piece 1 | piece 2 | ... ]
                                       |  up         ^  down (all but the gradient)
    device   buffer 0, 1, 2            +--> kernel --+--> parameters in compute dtype, which rest on the device

The kernel, its table of scalars and its arithmetic are those of state on the device, so both give the same bits. What
the plan keeps on the device (float32 parameters; accumulated gradients) is used where it is. Who runs the pieces, and
on which streams, is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zeroshard.optim.device_adam import DeviceAdam
from zeroshard.optim.kernels.tiles import tile_table
from zeroshard.optim.regions import Region
from zeroshard.optim.rules import Rule


@dataclass(frozen=True)
class StatePiece:
    """A part of a region's state on its way through a device buffer: three things to do, one after the other."""

    buffer: int
    upload: Callable[[], None]
    update: Callable[[], None]
    download: Callable[[], None]


class StreamedAdam(DeviceAdam):
    """The update of all regions of this rank, of which some have their state in host memory.

    Args:
        buffers: device memory, uint8, through which state passes in turns.
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
            if region.memory is not None
            else []
            for number, region in enumerate(regions)
        ]

    def pieces(self, number: int) -> Sequence[StatePiece]:
        """How to update region `number` by the prepared table; none where its state is on the device (`apply`)."""
        return self._pieces[number]

    def _piece(self, number: int, low: int, numel: int) -> StatePiece:
        region, (first, second) = self.regions[number], self._state[number]
        cut = slice(low, min(low + numel, region.master.numel()))
        turn = low // numel % len(self.buffers)
        passing = _Passing(self.buffers[turn])
        moments = [passing.add(state[cut]) for state in (first, second)]
        master = passing.add(region.master[cut]) if "master" in region.on_host else region.master[cut]
        param = None if region.param is None else region.param[cut]
        if param is not None and "param" in region.on_host:
            # It comes up too, though only written beside whole master weights: a skipped step writes nothing.
            param = passing.add(param)
        landing = passing.place(region.grad()[cut]) if "grad" in region.on_host else None
        tiles = tile_table(region.layout.pieces(region.start + cut.start, region.start + cut.stop), self._device)
        rows = self._rows[region.first_flag : region.first_flag + len(region.layout.segments)]
        decoupled = bool(self._rule.defaults["decoupled"])

        def upload() -> None:
            passing.upload()
            if landing is not None:
                landing.copy_(region.grad()[cut], non_blocking=True)

        def update() -> None:
            grad = region.grad()[cut] if landing is None else landing
            self._run(master, param, grad, moments[0], moments[1], tiles, rows, decoupled=decoupled)

        return StatePiece(turn, upload, update, passing.download)


class _Passing:
    """What of a piece lies in its buffer: pairs of where it rests and where it passes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._used = 0
        self._moves: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, host: torch.Tensor) -> torch.Tensor:
        """The place of `host` in the buffer, to which it comes up and from which it goes down."""
        place = self.place(host)
        self._moves.append((host, place))
        return place

    def place(self, like: torch.Tensor) -> torch.Tensor:
        """The next place in the buffer, for as much as `like` holds."""
        place = self._buffer[self._used : self._used + like.nbytes].view(like.dtype)
        self._used += like.nbytes
        return place

    def upload(self) -> None:
        """Copy to the device."""
        for host, place in self._moves:
            place.copy_(host, non_blocking=True)

    def download(self) -> None:
        """Copy back."""
        for host, place in self._moves:
            host.copy_(place, non_blocking=True)
