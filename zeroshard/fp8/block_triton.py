"""The Triton kernels of `block_kernels`, imported only if Triton is installed. See `cast` for the arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl

from zeroshard.fp8.cast_triton import magnitude_bits, power_of_two, shift_of, to_codes


@triton.jit
def cast_tile_both(
    values,
    codes,
    unscale,
    turned,
    of_turned,
    rows,
    columns,
    padded,
    BLOCK: tl.constexpr,
    E5M2: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row < rows)[:, None]
    place = row[:, None] * columns + column[None, :]
    found = tl.load(values + place, mask=inside, other=0.0)
    bits = magnitude_bits(found)
    shift = shift_of(tl.max(bits, axis=1), E5M2)
    tl.store(unscale + tl.program_id(1).to(tl.int64) * rows + row, power_of_two(-shift), mask=row < rows)
    tl.store(codes + place, to_codes(found, power_of_two(shift)[:, None], E5M2), mask=inside)
    if TRANSPOSED:
        down = shift_of(tl.max(bits, axis=0), E5M2)
        tl.store(of_turned + tl.program_id(0).to(tl.int64) * columns + column, power_of_two(-down))
        by_column = to_codes(found, power_of_two(down)[None, :], E5M2)
        tl.store(turned + column[:, None] * padded + row[None, :], tl.trans(by_column))


@triton.jit
def cast_block(values, codes, unscale, columns, BLOCK: tl.constexpr, E5M2: tl.constexpr):
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    place = row[:, None] * columns + column[None, :]
    found = tl.load(values + place)
    shift = shift_of(tl.max(tl.max(magnitude_bits(found), axis=1), axis=0), E5M2)
    tl.store(unscale + tl.program_id(0) * (columns // BLOCK) + tl.program_id(1), power_of_two(-shift))
    tl.store(codes + place, to_codes(found, power_of_two(shift), E5M2))
