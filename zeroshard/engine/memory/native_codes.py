"""Codes made and read by native code (csrc/codes) where values are on the processor; see block_codes for what they are.

A plain C interface through ctypes, which releases the interpreter for the length of a call. Where the library is not
there, or for another dtype, a block of more than 4,096 elements, or an error that is an average, torch's operations do
the same, to the same bits.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from zeroshard.native_library import load_versioned
from zeroshard.plan.hops import Feedback
from zeroshard.plan.placement import Blocks

LIBRARY = Path(__file__).with_name("libzeroshard_codes.so")
VERSION = 1
"""What `zeroshard_codes_version` must answer."""

_MOST = 4096
_DTYPES = {torch.float32: 1, torch.bfloat16: 2}
_int32, _int64, _address = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


@cache
def load_library(path: Path = LIBRARY) -> ctypes.CDLL | None:
    """The library; None where it is not there, can't be loaded or is of another version. Nothing is compiled."""
    library, _ = load_versioned(path, "codes", VERSION)
    if library is None:
        return None
    encode, decode = library.zeroshard_codes_encode, library.zeroshard_codes_decode
    encode.restype = decode.restype = _int32
    encode.argtypes = [*[_int64] * 4, _address, _int32, _address, _address]
    decode.argtypes = [*[_int64] * 4, _address, _address, *[_int32] * 3]
    return library


def encode(
    values: torch.Tensor,
    records: torch.Tensor,
    blocks: Blocks,
    ranks: int,
    error: torch.Tensor | None,
    feedback: Feedback | None,
) -> bool:
    """As block_codes.encode; False where it is not for native code, and nothing was done."""
    library = _library_for(values, records, blocks)
    if library is None or (error is not None and not _plain(error, feedback)):
        return False
    code = library.zeroshard_codes_encode(
        values.numel(),
        ranks,
        blocks.size,
        blocks.bits,
        values.data_ptr(),
        _DTYPES[values.dtype],
        None if error is None else error.data_ptr(),
        records.data_ptr(),
    )
    assert code == 0, "the library refused what was checked"
    return True


def decode(
    records: torch.Tensor, ranks: int, values: torch.Tensor, blocks: Blocks, *, add: bool, summed: bool = False
) -> bool:
    """As block_codes.decode, or decode_sum; False where it is not for native code, and nothing was done."""
    library = _library_for(values, records, blocks)
    if library is None:
        return False
    numel = values.numel() * ranks if summed else values.numel()
    code = library.zeroshard_codes_decode(
        numel,
        ranks,
        blocks.size,
        blocks.bits,
        records.data_ptr(),
        values.data_ptr(),
        _DTYPES[values.dtype],
        add,
        summed,
    )
    assert code == 0, "the library refused what was checked"
    return True


def _library_for(values: torch.Tensor, records: torch.Tensor, blocks: Blocks) -> ctypes.CDLL | None:
    flat = values.is_contiguous() and records.is_contiguous() and values.is_cpu and records.is_cpu
    return load_library() if flat and values.dtype in _DTYPES and blocks.size <= _MOST else None


def _plain(error: torch.Tensor, feedback: Feedback | None) -> bool:
    return feedback is not None and not feedback.beta and error.dtype == torch.bfloat16 and error.is_contiguous()
