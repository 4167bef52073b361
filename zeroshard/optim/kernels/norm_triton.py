"""The Triton kernel of `kernels.norm`; imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_squares(values, partial, count, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    index = tile * TILE + tl.arange(0, TILE)
    x = tl.load(values + index, mask=index < count, other=0.0).to(tl.float32)
    # Squares of 16-bit values are exact in float32; float32 ones lose 2**-24 of a term, then float64 sums them.
    tl.store(partial + tile, tl.sum((x * x).to(tl.float64), axis=0))
