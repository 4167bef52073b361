"""The Triton kernel of `kernels.rows`; imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_sum(rows, out, tiles, numel, count, RANKS: tl.constexpr, ADD: tl.constexpr, TILE: tl.constexpr):
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        low = tl.multiple_of(tl.load(tiles + tile.to(tl.int64) * 2), 64)
        end = tl.load(tiles + tile.to(tl.int64) * 2 + 1)
        index = low + tl.arange(0, TILE)
        inside = index < end
        total = tl.load(rows + index, mask=inside, other=0.0).to(tl.float32)
        for rank in tl.static_range(1, RANKS):
            total += tl.load(rows + rank * numel.to(tl.int64) + index, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            total += tl.load(out + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + index, total.to(out.dtype.element_ty), mask=inside)
