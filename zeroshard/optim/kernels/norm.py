"""Sum of squares over many flat tensors in one launch per dtype, in float64.

tiles, a row each:  [ number of the tensor | first element | elements ]    static
pointers:           [ address of each tensor ]                             sent when an address has changed
partial sums (tiles,)  --sum-->  one float64;  the first that is not finite tells where the trouble is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NORM_TILE = 16_384
FINITE = 2**62
"""Number of the first non-finite tile where there is none."""


@dataclass
class _Launch:
    members: list[int]
    tiles: torch.Tensor
    pointers: torch.Tensor
    partial: torch.Tensor
    numbers: torch.Tensor
    addresses: tuple[int, ...] = ()


class SquaredNorm:
    """The sum of squares of tensors of fixed sizes and dtypes, wherever they are in each call.

    Args:
        shapes: dtype and number of elements of each tensor; float32, bfloat16 or float16.

    Attributes:
        first_bad: int64 scalar on the device: number of the first tile of the last call that was not finite, or FINITE.
    """

    def __init__(self, shapes: Sequence[tuple[torch.dtype, int]], device: torch.device) -> None:
        self._device = device
        self._where: list[tuple[int, int]] = []
        self._launches = [self._plan(shapes, dtype) for dtype in dict.fromkeys(dtype for dtype, _ in shapes)]
        self.first_bad = torch.full((), FINITE, dtype=torch.int64, device=device)

    def _plan(self, shapes: Sequence[tuple[torch.dtype, int]], dtype: torch.dtype) -> _Launch:
        members = [number for number, (kind, _) in enumerate(shapes) if kind == dtype]
        rows = [
            (place, low, min(NORM_TILE, shapes[number][1] - low))
            for place, number in enumerate(members)
            for low in range(0, shapes[number][1], NORM_TILE)
        ]
        first = len(self._where)
        self._where += [(members[place], low) for place, low, _ in rows]
        device = self._device
        return _Launch(
            members,
            torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).to(device),
            torch.zeros(len(members), dtype=torch.int64, device=device),
            torch.zeros(len(rows), dtype=torch.float64, device=device),
            torch.arange(first, first + len(rows), device=device),
        )

    def place_of(self, tile: int) -> tuple[int, int]:
        """Tensor number and first element of a tile."""
        return self._where[tile]

    def into(self, total: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Write the sum into `total`, a float64 scalar; nothing waits for the device."""
        total.zero_()
        self.first_bad.fill_(FINITE)
        for launch in self._launches:
            if not launch.partial.numel():
                continue
            self._sum_tiles(launch, [tensors[number] for number in launch.members])
            total.add_(launch.partial.sum())
            bad = torch.where(launch.partial.isfinite(), FINITE, launch.numbers).min()
            torch.minimum(self.first_bad, bad, out=self.first_bad)

    def _sum_tiles(self, launch: _Launch, tensors: Sequence[torch.Tensor]) -> None:
        if self._device.type != "cuda":
            for row, (place, low, count) in enumerate(launch.tiles.tolist()):
                launch.partial[row] = tensors[place][low : low + count].double().square().sum()
            return
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if addresses != launch.addresses:
            # A fresh pinned tensor: its memory is not reused before the copy has run.
            launch.pointers.copy_(torch.tensor(addresses, dtype=torch.int64).pin_memory(), non_blocking=True)
            launch.addresses = addresses
        _compiled()[(launch.tiles.shape[0],)](
            launch.tiles, launch.pointers, launch.partial, tensors[0], TILE=NORM_TILE, num_warps=8
        )


def _compiled() -> Any:
    from zeroshard.optim.kernels.norm_triton import tile_squares

    return tile_squares
