"""The Triton kernels of `shard_kernels`, imported only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

from zeroshard.fp8.cast_triton import magnitude_bits, power_of_two, shift_of, to_codes


@triton.jit
def largest_of_tiles(master, tiles, largest, numel, count, TILE: tl.constexpr, TILES: tl.constexpr):
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    number = tl.load(tiles + tile, mask=tile < count, other=-1)
    place = tile.to(tl.int64)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = (place < numel) & (number >= 0)[:, None]
    found = tl.max(magnitude_bits(tl.load(master + place, mask=inside, other=0.0)), axis=1)
    first = tl.max(number, axis=0)
    if tl.min(number, axis=0) == first:
        tl.atomic_max(largest + tl.maximum(first, 0), tl.max(found, axis=0))
    else:
        tl.atomic_max(largest + tl.maximum(number, 0), found, mask=number >= 0)


@triton.jit
def cast_tiles(master, tiles, largest, codes, numel, count, TILE: tl.constexpr, TILES: tl.constexpr):
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    number = tl.load(tiles + tile, mask=tile < count, other=-1)
    bits = tl.load(largest + tl.maximum(number, 0), mask=number >= 0, other=0)
    place = tile.to(tl.int64)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = place < numel
    values = tl.load(master + place, mask=inside & (number >= 0)[:, None], other=0.0)
    found = to_codes(values, power_of_two(shift_of(bits, False))[:, None], False)
    tl.store(codes + place, found, mask=inside)
