"""The Triton kernels of `kernel_codes`; imported only where Triton is.

A program has some blocks of one record: codes of 8 bits as one tile (blocks, elements), of 4 bits as two, one for each
half of the bytes. Divisions are those of IEEE and nothing becomes a fused multiply-add: all bits are the processor's.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_SCALE = tl.constexpr(1.1754943508222875e-38)
MAGIC = tl.constexpr(12582912.0)
"""Added and taken away again it leaves the nearest whole number, ties to even, of what is below 2 ** 22."""


@triton.jit
def encode_blocks(
    values,
    error,
    records,
    blocks,
    record_bytes,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_ERROR: tl.constexpr,
):
    """Blocks of `values` become codes and scales in the record of rank `program_id(1)`."""
    rank = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = number < blocks
    first = (rank * blocks + number) * SIZE
    record = records + rank * record_bytes
    scales = (record + blocks * (SIZE * BITS // 8)).to(tl.pointer_type(tl.float32))
    if BITS == 8:
        at = first[:, None] + tl.arange(0, SIZE)[None, :]
        x = _values(values, error, at, there, HAS_ERROR)
        scale = tl.div_rn(_largest(x).to(tl.float32, bitcast=True), 127.0)
        codes = _codes(x, scale)
        out = number[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        tl.store(record + out, codes.to(tl.int8).to(tl.uint8, bitcast=True), mask=there[:, None])
        if HAS_ERROR:
            _keep(error, at, there, x, codes, scale)
    else:
        HALF: tl.constexpr = SIZE // 2
        at = first[:, None] + tl.arange(0, HALF)[None, :]
        low = _values(values, error, at, there, HAS_ERROR)
        high = _values(values, error, at + HALF, there, HAS_ERROR)
        scale = tl.div_rn(tl.maximum(_largest(low), _largest(high)).to(tl.float32, bitcast=True), 7.0)
        low_codes, high_codes = _codes(low, scale), _codes(high, scale)
        packed = (low_codes.to(tl.int32) & 15) | ((high_codes.to(tl.int32) & 15) << 4)
        out = number[:, None] * HALF + tl.arange(0, HALF)[None, :]
        tl.store(record + out, packed.to(tl.uint8), mask=there[:, None])
        if HAS_ERROR:
            _keep(error, at, there, low, low_codes, scale)
            _keep(error, at + HALF, there, high, high_codes, scale)
    tl.store(scales + number, scale, mask=there)


@triton.jit
def decode_blocks(
    records,
    values,
    blocks,
    record_bytes,
    sources,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Blocks of `values` become, or get added, the sum of what `sources` records from number `program_id(1)` on say."""
    target = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = number < blocks
    first = (target * blocks + number) * SIZE
    WIDTH: tl.constexpr = SIZE if BITS == 8 else SIZE // 2
    code = number[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    at = first[:, None] + tl.arange(0, WIDTH)[None, :]
    low, high = _decoded(records + target * record_bytes, code, number, there, blocks, SIZE, BITS)
    for source in range(1, sources):  # not unrolled, which takes more registers and is slower on an H200
        more_low, more_high = _decoded(records + source * record_bytes, code, number, there, blocks, SIZE, BITS)
        low += more_low
        high += more_high
    _write(values, at, low, there, ADD)
    if BITS == 4:
        _write(values, at + WIDTH, high, there, ADD)


@triton.jit
def _decoded(record, code, number, there, blocks, SIZE: tl.constexpr, BITS: tl.constexpr):
    """What a record stands for: the lower and the upper halves of blocks, or, of 8 bits, the same twice."""
    scales = (record + blocks * (SIZE * BITS // 8)).to(tl.pointer_type(tl.float32))
    scale = tl.load(scales + number, mask=there, other=0.0)[:, None]
    codes = tl.load(record + code, mask=there[:, None], other=0).to(tl.int8, bitcast=True)
    if BITS == 8:
        found = codes.to(tl.float32) * scale
        return found, found
    wide = codes.to(tl.int32)
    return ((wide << 28) >> 28).to(tl.float32) * scale, (wide >> 4).to(tl.float32) * scale


@triton.jit
def _write(values, at, found, there, ADD: tl.constexpr):
    if ADD:
        found = tl.load(values + at, mask=there[:, None], other=0.0).to(tl.float32) + found
    tl.store(values + at, found.to(values.dtype.element_ty), mask=there[:, None])


@triton.jit
def _values(values, error, at, there, HAS_ERROR: tl.constexpr):
    x = tl.load(values + at, mask=there[:, None], other=0.0).to(tl.float32)
    if HAS_ERROR:
        x = x + tl.load(error + at, mask=there[:, None], other=0.0).to(tl.float32)
    return x


@triton.jit
def _largest(x):
    """The bits of the largest magnitude of each row; compared as whole numbers, in which NaN is above inf."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def _codes(x, scale):
    """Whole numbers, as float32; 0 where a block has an inf or NaN, whose scale says so."""
    inverse = tl.where(scale >= LEAST_SCALE, tl.div_rn(1.0, scale), 0.0)
    codes = (x * inverse[:, None] + MAGIC) - MAGIC
    return tl.where(codes == codes, codes, 0.0)


@triton.jit
def _keep(error, at, there, x, codes, scale):
    """Renew what codes left out; nothing of a block that is not finite."""
    left = x - codes * scale[:, None]
    finite = (left.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    tl.store(error + at, tl.where(finite, left, 0.0).to(error.dtype.element_ty), mask=there[:, None])
