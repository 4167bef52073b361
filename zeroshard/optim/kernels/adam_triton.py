"""The Triton kernel of `kernels.adam`; imported only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

from zeroshard.optim.kernels.whole_triton import BORDER, put, take


@triton.jit
def adam_step(
    master,
    param,
    grad,
    first,
    second,
    tiles,
    rows,
    DECOUPLED: tl.constexpr,
    COPY: tl.constexpr,
    SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    start = tl.load(tiles + tile * 3)
    count = tl.load(tiles + tile * 3 + 1) - start
    row = rows + tl.load(tiles + tile * 3 + 2) * COLUMNS
    if count == TILE:
        start = tl.multiple_of(start, BORDER)
        adam_tile(master, param, grad, first, second, start, row, count, DECOUPLED, COPY, SPLIT, TILE, True)
    else:
        adam_tile(master, param, grad, first, second, start, row, count, DECOUPLED, COPY, SPLIT, TILE, False)


@triton.jit
def adam_tile(
    master,
    param,
    grad,
    first,
    second,
    start,
    row,
    count,
    DECOUPLED: tl.constexpr,
    COPY: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The update of one tile of `count` elements from `start` on."""
    index = tl.arange(0, TILE)
    master, param, grad, first, second = master + start, param + start, grad + start, first + start, second + start
    # All loads are issued before any of them is waited for, though a row that is off does not need them: that is rare,
    # and one wait less per tile saves 2 to 20 percent of the time.
    g = take(grad, index, count, WHOLE).to(tl.float32)
    if SPLIT:
        upper = take(param, index, count, WHOLE).to(tl.int16, bitcast=True).to(tl.int32)
        remainder = take(master, index, count, WHOLE).to(tl.int32)
        p = ((upper << 16) + remainder).to(tl.float32, bitcast=True)
    else:
        p = take(master, index, count, WHOLE)
    m = take(first, index, count, WHOLE)
    v = take(second, index, count, WHOLE)
    if tl.load(row) != 0.0:
        coefficient = tl.load(row + 1)
        decay = tl.load(row + 2)
        step_size = tl.load(row + 3)
        correction = tl.load(row + 4)
        eps = tl.load(row + 5)
        one_beta1 = tl.load(row + 6)
        beta2 = tl.load(row + 7)
        one_beta2 = tl.load(row + 8)
        g = g * coefficient
        if DECOUPLED:
            p = p * decay
        else:
            g = g + p * decay
        m = m + (g - m) * one_beta1
        v = v * beta2 + g * g * one_beta2
        p = p - step_size * m / (tl.sqrt_rn(v) * correction + eps)
        put(first, index, m, count, WHOLE)
        put(second, index, v, count, WHOLE)
        if SPLIT:
            bits = p.to(tl.int32, bitcast=True)
            high = (bits + 0x8000) >> 16
            put(param, index, high.to(tl.int16).to(tl.bfloat16, bitcast=True), count, WHOLE)
            put(master, index, (bits - (high << 16)).to(tl.int16), count, WHOLE)
        else:
            put(master, index, p, count, WHOLE)
        if COPY and not SPLIT:
            put(param, index, p.to(param.dtype.element_ty), count, WHOLE)
