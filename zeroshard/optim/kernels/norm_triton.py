"""The Triton kernel of `kernels.norm`; imported only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

from zeroshard.optim.kernels.whole_triton import BORDER, take


@triton.jit
def tile_squares(values, partial, tiles, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    start = tl.load(tiles + tile * 3)
    count = tl.load(tiles + tile * 3 + 1) - start
    if count == TILE:
        store_squares(take(values + tl.multiple_of(start, BORDER), tl.arange(0, TILE), count, True), partial + tile)
    else:
        store_squares(take(values + start, tl.arange(0, TILE), count, False), partial + tile)


@triton.jit
def store_squares(values, place):
    """Write the sum of squares of a tile to `place`."""
    # Squares of 16-bit values are exact in float32, those of float32 values are rounded by 2**-24; both sum in float64.
    x = values.to(tl.float32)
    tl.store(place, tl.sum((x * x).to(tl.float64), axis=0))
