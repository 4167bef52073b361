"""Launches the Triton kernels of the casts, where Triton is and values are on a GPU.

    largest    each program leaves the largest magnitude of its part
    cast       each program reads those of all, makes the scale from them, and casts a tile, transposed in registers

Without atomics and without zeros to write first: two launches for a cast. Rejected: the scale made by operations of
torch, which are eight launches more.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_PROGRAMS = 512
"""That look for the largest magnitude; a power of two, as each cast reads the result of all."""
_CHUNK = 8192
_TILE = 64
_ROWS_WARPS = 8
_E5M2 = {torch.float8_e4m3fn: False, torch.float8_e5m2: True}


def cast(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See cast.cast."""
    codes, _, unscale = _cast(values, kind, straight=True, transposed=False)
    return codes, unscale


def cast_transposed(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See cast.cast_transposed."""
    _, turned, unscale = _cast(values, kind, straight=False, transposed=True)
    return turned, unscale


def cast_both(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See cast.cast_both."""
    return _cast(values, kind, straight=True, transposed=True)


def cast_rows(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and the unscale of each row; rows may be those of a transposed matrix."""
    rows, columns = values.shape
    codes = torch.empty((rows, columns), dtype=kind, device=values.device)
    unscale = torch.empty((rows, 1), dtype=torch.float32, device=values.device)
    if values.stride(1) != 1:
        values = values.contiguous()
    _kernels().cast_row[(rows,)](
        values, codes, unscale, columns, values.stride(0), CHUNK=4096, E5M2=_E5M2[kind], num_warps=_ROWS_WARPS
    )
    return codes, unscale


def transpose(codes: torch.Tensor) -> torch.Tensor:
    """See cast.transpose."""
    codes = codes.contiguous()
    rows, columns = codes.shape
    padded = padded_rows(rows)
    turned = torch.empty((columns, padded), dtype=codes.dtype, device=codes.device)
    grid = (-(-padded // 128), -(-columns // 128))
    _kernels().transpose_tile[grid](
        codes.view(torch.uint8), turned.view(torch.uint8), rows, columns, padded, TILE=128, num_warps=8
    )
    return turned


def _cast(
    values: torch.Tensor, kind: torch.dtype, *, straight: bool, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, transposed codes (each of no elements where it is not asked for), and the unscale of a matrix."""
    values = values.contiguous()
    rows, columns = values.shape
    padded = padded_rows(rows)
    partial = torch.empty(_PROGRAMS, dtype=torch.int32, device=values.device)
    unscale = torch.empty(1, dtype=torch.float32, device=values.device)
    codes = torch.empty((rows, columns) if straight else (0,), dtype=kind, device=values.device)
    turned = torch.empty((columns, padded) if transposed else (0,), dtype=kind, device=values.device)
    _kernels().largest_of[(_PROGRAMS,)](values, partial, values.numel(), PROGRAMS=_PROGRAMS, CHUNK=_CHUNK, num_warps=8)
    grid = (-(-padded // _TILE), -(-columns // _TILE))
    _kernels().cast_tile[grid](
        values,
        partial,
        codes,
        turned,
        unscale,
        rows,
        columns,
        padded,
        PROGRAMS=_PROGRAMS,
        TILE=_TILE,
        E5M2=_E5M2[kind],
        STRAIGHT=straight,
        TRANSPOSED=transposed,
        num_warps=4,
    )
    return codes, turned, unscale


def padded_rows(rows: int) -> int:
    """Columns of a transposed cast."""
    return -(-rows // 16) * 16


@cache
def _kernels() -> Any:
    from zeroshard.fp8 import cast_triton

    return cast_triton
