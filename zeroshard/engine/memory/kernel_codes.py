"""Codes made and read by Triton kernels where values are on a GPU; see block_codes for what they are.

Each value is read once and each code written once, where torch's operations pass over memory five times and more.
Where Triton is not there, or for another dtype, a block whose size is no power of two, or an error that is an average,
torch's operations do the same. Rejected: those compiled by torch.compile, which compiles anew for each length of a
group and fuses products and sums, so that a GPU would have other bits than a processor.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from zeroshard.plan.hops import Feedback
from zeroshard.plan.placement import Blocks

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 2048
"""Elements of a program; with two warps the fastest of those from 1,024 to 8,192 elements on an H200."""
_LEAST, _MOST = 16, 2048
"""Elements of a block."""


def encode(
    values: torch.Tensor,
    records: torch.Tensor,
    blocks: Blocks,
    ranks: int,
    error: torch.Tensor | None,
    feedback: Feedback | None,
) -> bool:
    """As block_codes.encode; False where it is not for a kernel, and nothing was done."""
    if not _suits(values, records, blocks) or (error is not None and not _plain(error, feedback)):
        return False
    number, rows = values.numel() // (ranks * blocks.size), _TILE // blocks.size
    grid = (-(-number // rows), ranks)
    _kernels().encode_blocks[grid](
        values,
        values if error is None else error,
        records,
        number,
        records.numel() // ranks,
        SIZE=blocks.size,
        BITS=blocks.bits,
        ROWS=rows,
        HAS_ERROR=error is not None,
        **_OPTIONS,
    )
    return True


def decode(
    records: torch.Tensor, ranks: int, values: torch.Tensor, blocks: Blocks, *, add: bool, summed: bool = False
) -> bool:
    """As block_codes.decode, or decode_sum; False where it is not for a kernel, and nothing was done."""
    if not _suits(values, records, blocks):
        return False
    targets, sources = (1, ranks) if summed else (ranks, 1)
    number, rows = values.numel() // (targets * blocks.size), _TILE // blocks.size
    grid = (-(-number // rows), targets)
    _kernels().decode_blocks[grid](
        records,
        values,
        number,
        records.numel() // ranks,
        sources,
        SIZE=blocks.size,
        BITS=blocks.bits,
        ROWS=rows,
        ADD=add,
        **_OPTIONS,
    )
    return True


_OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}


def _suits(values: torch.Tensor, records: torch.Tensor, blocks: Blocks) -> bool:
    size = blocks.size
    if not (values.is_cuda and values.dtype in _DTYPES and _LEAST <= size <= _MOST and size & (size - 1) == 0):
        return False
    return values.numel() > 0 and values.is_contiguous() and records.is_contiguous() and _kernels() is not None


def _plain(error: torch.Tensor, feedback: Feedback | None) -> bool:
    return feedback is not None and not feedback.beta and error.is_contiguous() and error.dtype in _DTYPES


@cache
def _kernels() -> Any:
    if find_spec("triton") is None:
        return None
    from zeroshard.engine.memory import codes_triton

    return codes_triton
