"""Sum of squares over many flat tensors in float64: each is squared as soon as it is ready, and summed at the end.

    tensor 0   tensor 1             tensor 2
    [ tile | tile | tile | tile | tile | ... ]   partial sums, float64   --sum-->  one float64
                                                                 the first sum that is not finite shows where

A tensor can be squared as soon as it is ready, on the stream that made it, at the same time as other work, or by the
kernel that makes it (`RowSum`). A tile never crosses a border of parameters, so both ways give the same partial sums.
Rejected: one launch for all tensors at the end, when no other work runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from zeroshard.optim.kernels.tiles import GRADIENT_TILE, tile_table

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FINITE = 2**62
"""The number in place of the first non-finite tile, if all are finite."""
Pieces = Sequence[tuple[int, int]]
"""Elements [start, end) of a tensor, in ascending order, each starting at a multiple of the layout's alignment."""


class SquaredNorm:
    """The sum of squares of tensors.

    Args:
        pieces: the elements of each tensor that count.

    Attributes:
        first_bad: int64 scalar on the device: number of the first tile of the last sum that was not finite, or FINITE.
    """

    def __init__(self, pieces: Sequence[Pieces], device: torch.device) -> None:
        self._tiles = [tile_table(((0, *piece) for piece in tensor), device, GRADIENT_TILE) for tensor in pieces]
        self._starts = [0, *accumulate(len(tiles) for tiles in self._tiles)]
        self._partial = torch.zeros(self._starts[-1], dtype=torch.float64, device=device)
        self._numbers = torch.arange(self._starts[-1], device=device)
        self.first_bad = torch.full((), FINITE, dtype=torch.int64, device=device)

    def place_of(self, tile: int) -> tuple[int, int]:
        """Tensor number and first element of a tile. Waits for the device."""
        number = max(n for n, start in enumerate(self._starts[:-1]) if start <= tile < self._starts[n + 1])
        return number, int(self._tiles[number][tile - self._starts[number], 0])

    def partial(self, number: int) -> torch.Tensor:
        """The float64 (tiles,) sums of squares of tensor `number`, to be written by a kernel that makes the tensor."""
        return self._partial[self._starts[number] : self._starts[number + 1]]

    def square(self, number: int, tensor: torch.Tensor) -> None:
        """Sum the squares of tensor `number`, float32, bfloat16 or float16 (n,), on the current stream."""
        partial, tiles = self.partial(number), self._tiles[number]
        if not partial.numel():
            return
        if tensor.is_cuda:
            _compiled()[(len(tiles),)](tensor, partial, tiles, TILE=GRADIENT_TILE, num_warps=8)
            return
        for place, (low, end, _) in enumerate(tiles.tolist()):
            partial[place] = tensor[low:end].double().square().sum()

    def into(self, total: torch.Tensor) -> None:
        """Write the sum of all tensors' squares into `total`, a float64 scalar; the host does not wait."""
        if not self._partial.numel():
            total.zero_()
            return
        torch.sum(self._partial, dim=0, out=total)
        torch.amin(torch.where(self._partial.isfinite(), FINITE, self._numbers), dim=0, out=self.first_bad)


def _compiled() -> Any:
    from zeroshard.optim.kernels.norm_triton import tile_squares

    return tile_squares
