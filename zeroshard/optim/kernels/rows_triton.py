"""The Triton kernel of `kernels.rows`; imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_sum(rows, out, tiles, numel, RANKS: tl.constexpr, ADD: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    low = tl.multiple_of(tl.load(tiles + tile * 2), 64)
    end = tl.load(tiles + tile * 2 + 1)
    index = low + tl.arange(0, TILE)
    inside = index < end
    total = tl.load(rows + index, mask=inside, other=0.0).to(tl.float32)
    row = rows
    for _ in tl.static_range(1, RANKS):
        row += numel
        total += tl.load(row + index, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(out + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=inside)
