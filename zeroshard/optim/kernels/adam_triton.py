"""The Triton kernel of `kernels.adam`; imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl


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
    start = tl.multiple_of(tl.load(tiles + tile * 3).to(tl.int64), 64)
    end = tl.load(tiles + tile * 3 + 1)
    row = rows + tl.load(tiles + tile * 3 + 2) * COLUMNS
    index = start + tl.arange(0, TILE)
    inside = index < end
    # All loads go out before any of them is waited for: whether the row is on is known later than where it lies, and a
    # step that is left out is rare. One wait less for each tile is 2 to 20 percent of the time.
    g = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)
    if SPLIT:
        upper = tl.load(param + index, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        remainder = tl.load(master + index, mask=inside, other=0).to(tl.int32)
        p = ((upper << 16) + remainder).to(tl.float32, bitcast=True)
    else:
        p = tl.load(master + index, mask=inside, other=0.0)
    m = tl.load(first + index, mask=inside, other=0.0)
    v = tl.load(second + index, mask=inside, other=0.0)
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
        tl.store(first + index, m, mask=inside)
        tl.store(second + index, v, mask=inside)
        if SPLIT:
            bits = p.to(tl.int32, bitcast=True)
            high = (bits + 0x8000) >> 16
            tl.store(param + index, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
            tl.store(master + index, (bits - (high << 16)).to(tl.int16), mask=inside)
        else:
            tl.store(master + index, p, mask=inside)
        if COPY and not SPLIT:
            tl.store(param + index, p.to(param.dtype.element_ty), mask=inside)
