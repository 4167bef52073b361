"""The Triton kernel of `kernels.rows`; imported only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

from zeroshard.optim.kernels.norm_triton import store_squares
from zeroshard.optim.kernels.whole_triton import BORDER, put, take


@triton.jit
def row_sum(
    s0,
    s1,
    s2,
    s3,
    s4,
    s5,
    s6,
    s7,
    rows,
    out,
    partial,
    tiles,
    numel,
    RANKS: tl.constexpr,
    OWN: tl.constexpr,
    ADD: tl.constexpr,
    SQUARE: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    low = tl.load(tiles + tile * 4)
    count = tl.load(tiles + tile * 4 + 1) - low
    number = tl.load(tiles + tile * 4 + 2)
    source = s0
    source = tl.where(number == 1, s1, source)
    source = tl.where(number == 2, s2, source)
    source = tl.where(number == 3, s3, source)
    source = tl.where(number == 4, s4, source)
    source = tl.where(number == 5, s5, source)
    source = tl.where(number == 6, s6, source)
    source = tl.where(number == 7, s7, source)
    first = tl.load(tiles + tile * 4 + 3)
    partial += tile
    if count == TILE:
        low, first = tl.multiple_of(low, BORDER), tl.multiple_of(first, BORDER)
        sum_tile(source + first, rows + low, out + low, partial, numel, count, RANKS, OWN, ADD, SQUARE, TILE, True)
    else:
        sum_tile(source + first, rows + low, out + low, partial, numel, count, RANKS, OWN, ADD, SQUARE, TILE, False)


@triton.jit
def sum_tile(
    source,
    row,
    out,
    partial,
    numel,
    count,
    RANKS: tl.constexpr,
    OWN: tl.constexpr,
    ADD: tl.constexpr,
    SQUARE: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The sum of one tile of `count` elements."""
    index = tl.arange(0, TILE)
    if OWN == 0:
        total = take(source, index, count, WHOLE).to(tl.float32)
    else:
        total = take(row, index, count, WHOLE).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        row += numel
        if rank == OWN:
            total += take(source, index, count, WHOLE).to(tl.float32)
        else:
            total += take(row, index, count, WHOLE).to(tl.float32)
    if ADD:
        total += take(out, index, count, WHOLE).to(tl.float32)
    values = total.to(out.dtype.element_ty)
    put(out, index, values, count, WHOLE)
    if SQUARE:
        store_squares(values, partial)
