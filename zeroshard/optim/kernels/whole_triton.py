"""Loads and stores of a tile for Triton kernels: 16 bytes at once for a whole tile, masked for a short one."""

from __future__ import annotations

import triton
import triton.language as tl

from zeroshard.optim.kernels import tiles

BORDER = tl.constexpr(tiles.BORDER)
"""Whole tiles begin at multiples of it, which kernels state to the compiler (multiple_of) for whole tiles only."""


@triton.jit
def take(pointer, index, count, WHOLE: tl.constexpr):
    """Elements `index` from `pointer` on; zero from `count` on."""
    return tl.load(pointer + index) if WHOLE else tl.load(pointer + index, mask=index < count, other=0.0)


@triton.jit
def put(pointer, index, values, count, WHOLE: tl.constexpr):
    """Store `values` as elements `index` from `pointer` on, up to `count`."""
    if WHOLE:
        tl.store(pointer + index, values)
    else:
        tl.store(pointer + index, values, mask=index < count)
