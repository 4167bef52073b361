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


@triton.jit
def place_of_block(blocks, BLOCK: tl.constexpr):
    """The places of a block's elements in the shard, and the number of its scale."""
    block = blocks + tl.program_id(0) * 3
    # Rows of a block begin at multiples of its side, so that several elements are read and written at once.
    start, columns = tl.multiple_of(tl.load(block), BLOCK), tl.multiple_of(tl.load(block + 1), BLOCK)
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    return start + row[:, None] * columns + column[None, :], tl.load(block + 2)


@triton.jit
def cast_whole_block(master, blocks, largest, codes, BLOCK: tl.constexpr):
    place, scale = place_of_block(blocks, BLOCK)
    values = tl.load(master + place)
    bits = tl.max(tl.max(magnitude_bits(values), axis=1), axis=0)
    tl.store(largest + scale, bits)
    tl.store(codes + place, to_codes(values, power_of_two(shift_of(bits, False)), False))


@triton.jit
def largest_of_cut_block(master, blocks, largest, numel, BLOCK: tl.constexpr):
    place, scale = place_of_block(blocks, BLOCK)
    values = tl.load(master + place, mask=(place >= 0) & (place < numel), other=0.0)
    tl.store(largest + scale, tl.max(tl.max(magnitude_bits(values), axis=1), axis=0))


@triton.jit
def cast_cut_block(master, blocks, largest, codes, numel, BLOCK: tl.constexpr):
    place, scale = place_of_block(blocks, BLOCK)
    inside = (place >= 0) & (place < numel)
    values = tl.load(master + place, mask=inside, other=0.0)
    shift = shift_of(tl.load(largest + scale), False)
    tl.store(codes + place, to_codes(values, power_of_two(shift), False), mask=inside)
