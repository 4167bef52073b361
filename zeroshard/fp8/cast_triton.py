"""The Triton kernels of the casts to fp8, imported only if Triton is installed. See `cast` for the arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(values):
    """Magnitudes as integers in the same order, with NaN above all others."""
    return tl.abs(values.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def shift_of(bits, E5M2: tl.constexpr):
    """The exponent of the scale for a largest magnitude, given as bits."""
    exponent = 15 if E5M2 else 8
    bits = tl.minimum(bits, 0x7F800000)
    shift = exponent + 127 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(shift, -126), 126)


@triton.jit
def power_of_two(shift):
    return ((shift + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_codes(values, scale, E5M2: tl.constexpr):
    scaled = values.to(tl.float32) * scale
    # The conversion would turn an inf into the largest finite number.
    scaled = tl.where(tl.abs(scaled) == float("inf"), float("nan"), scaled)
    return scaled.to(tl.float8e5) if E5M2 else scaled.to(tl.float8e4nv)


@triton.jit
def largest_of(values, partial, numel, PROGRAMS: tl.constexpr, CHUNK: tl.constexpr):
    found = tl.zeros((CHUNK,), tl.int32)
    start = tl.program_id(0).to(tl.int64) * CHUNK
    while start < numel:
        place = start + tl.arange(0, CHUNK)
        found = tl.maximum(found, magnitude_bits(tl.load(values + place, mask=place < numel, other=0.0)))
        start += PROGRAMS * CHUNK
    tl.store(partial + tl.program_id(0), tl.max(found, axis=0))


@triton.jit
def cast_tile(
    values,
    partial,
    codes,
    turned,
    unscale,
    rows,
    columns,
    padded,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    E5M2: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    shift = shift_of(tl.max(tl.load(partial + tl.arange(0, PROGRAMS)), axis=0), E5M2)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(unscale, power_of_two(-shift))
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    found = to_codes(tl.load(values + place, mask=inside, other=0.0), power_of_two(shift), E5M2)
    tl.store(codes + place, found, mask=inside)
    if TRANSPOSED:
        wanted = (column < columns)[:, None] & (row < padded)[None, :]
        tl.store(turned + column[:, None] * padded + row[None, :], tl.trans(found), mask=wanted)


@triton.jit
def cast_row(values, codes, unscale, columns, CHUNK: tl.constexpr, E5M2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    values += row * columns
    codes += row * columns
    found = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, columns, CHUNK):
        place = start + tl.arange(0, CHUNK)
        found = tl.maximum(found, magnitude_bits(tl.load(values + place, mask=place < columns, other=0.0)))
    shift = shift_of(tl.max(found, axis=0), E5M2)
    tl.store(unscale + row, power_of_two(-shift))
    for start in range(0, columns, CHUNK):
        place = start + tl.arange(0, CHUNK)
        inside = place < columns
        found_codes = to_codes(tl.load(values + place, mask=inside, other=0.0), power_of_two(shift), E5M2)
        tl.store(codes + place, found_codes, mask=inside)


@triton.jit
def transpose_tile(codes, turned, rows, columns, padded, TILE: tl.constexpr):
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    found = tl.load(codes + row[:, None] * columns + column[None, :], mask=inside, other=0)
    wanted = (column < columns)[:, None] & (row < padded)[None, :]
    tl.store(turned + column[:, None] * padded + row[None, :], tl.trans(found), mask=wanted)


@triton.jit
def largest_of_columns(values, largest, rows, columns, TILE: tl.constexpr, ROWS: tl.constexpr):
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    found = tl.zeros((TILE,), tl.int32)
    first = tl.program_id(1) * ROWS
    for start in range(0, ROWS, 32):
        row = (first + start + tl.arange(0, 32)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        block = tl.load(values + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
        found = tl.maximum(found, tl.max(magnitude_bits(block), axis=0))
    tl.atomic_max(largest + column, found, mask=column < columns)


@triton.jit
def cast_columns_tile(values, largest, turned, unscale, rows, columns, padded, TILE: tl.constexpr, E5M2: tl.constexpr):
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    shift = shift_of(tl.load(largest + column, mask=column < columns, other=0), E5M2)
    if tl.program_id(0) == 0:
        tl.store(unscale + column, power_of_two(-shift), mask=column < columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    block = tl.load(values + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    found = to_codes(block, power_of_two(shift)[None, :], E5M2)
    wanted = (column < columns)[:, None] & (row < padded)[None, :]
    tl.store(turned + column[:, None] * padded + row[None, :], tl.trans(found), mask=wanted)
