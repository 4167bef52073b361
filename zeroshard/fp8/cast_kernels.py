"""Launches the Triton kernels of the casts, for values on a GPU.

    largest    each program writes the largest magnitude of its part
    cast       each program reads the largest magnitudes of all parts, computes the scale, and casts a tile, which it
               transposes in registers

A cast takes two launches, needs no atomics and no zeroed memory, and torch.compile traces it. Rejected: scales computed
by torch's operations, with eight more launches; largest magnitudes found by torch.compile, whose reductions took longer
(docs/decisions/0034-products-in-fp8.md); custom operations, each of which takes the host 100 us.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroshard.fp8 import cast_triton

KERNELS: Any = cast_triton

_PROGRAMS = 512
"""Programs that find largest magnitudes; a power of two, since each cast reads the results of all."""
_CHUNK = 8192
_TILE = 64
_COLUMN_ROWS = 512
_ROWS_WARPS = 8
_E5M2 = {torch.float8_e4m3fn: False, torch.float8_e5m2: True}


def cast(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See cast.cast."""
    codes, _, unscale = _cast(values, kind, transposed=False)
    return codes, unscale


def cast_both(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See cast.cast_both."""
    return _cast(values, kind, transposed=True)


def cast_rows(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See cast.cast_rows."""
    values = values.contiguous()
    rows, columns = values.shape
    codes = torch.empty((rows, columns), dtype=kind, device=values.device)
    unscale = torch.empty((rows, 1), dtype=torch.float32, device=values.device)
    KERNELS.cast_row[(rows,)](values, codes, unscale, columns, CHUNK=4096, E5M2=_E5M2[kind], num_warps=_ROWS_WARPS)
    return codes, unscale


def cast_columns(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See cast.cast_columns."""
    values = values.contiguous()
    rows, columns = values.shape
    padded = padded_rows(rows)
    largest = torch.zeros(columns, dtype=torch.int32, device=values.device)
    grid = (-(-columns // _TILE), -(-rows // _COLUMN_ROWS))
    KERNELS.largest_of_columns[grid](values, largest, rows, columns, TILE=_TILE, ROWS=_COLUMN_ROWS, num_warps=4)
    turned = torch.empty((columns, padded), dtype=kind, device=values.device)
    unscale = torch.empty((columns, 1), dtype=torch.float32, device=values.device)
    grid = (-(-padded // _TILE), -(-columns // _TILE))
    KERNELS.cast_columns_tile[grid](
        values,
        largest,
        turned,
        unscale,
        rows,
        columns,
        padded,
        TILE=_TILE,
        E5M2=_E5M2[kind],
        num_warps=4,
    )
    return turned, unscale


def transpose(codes: torch.Tensor) -> torch.Tensor:
    """See cast.transpose."""
    codes = codes.contiguous()
    rows, columns = codes.shape
    padded = padded_rows(rows)
    turned = torch.empty((columns, padded), dtype=codes.dtype, device=codes.device)
    grid = (-(-padded // 128), -(-columns // 128))
    KERNELS.transpose_tile[grid](
        codes.view(torch.uint8), turned.view(torch.uint8), rows, columns, padded, TILE=128, num_warps=8
    )
    return turned


def _cast(
    values: torch.Tensor, kind: torch.dtype, *, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, transposed codes (without elements unless `transposed`), and the unscale of a matrix."""
    values = values.contiguous()
    rows, columns = values.shape
    padded = padded_rows(rows)
    unscale = torch.empty(1, dtype=torch.float32, device=values.device)
    codes = torch.empty((rows, columns), dtype=kind, device=values.device)
    turned = torch.empty((columns, padded) if transposed else (0,), dtype=kind, device=values.device)
    partial = _partial(values)
    grid = (-(-padded // _TILE), -(-columns // _TILE))
    KERNELS.cast_tile[grid](
        values,
        partial,
        codes,
        turned,
        unscale,
        rows,
        columns,
        padded,
        PROGRAMS=partial.numel(),
        TILE=_TILE,
        E5M2=_E5M2[kind],
        TRANSPOSED=transposed,
        num_warps=4,
    )
    return codes, turned, unscale


def _partial(values: torch.Tensor) -> torch.Tensor:
    """Largest magnitudes of the parts of a tensor, as the int32 bits of float32."""
    partial = torch.empty(_PROGRAMS, dtype=torch.int32, device=values.device)
    KERNELS.largest_of[(_PROGRAMS,)](values, partial, values.numel(), PROGRAMS=_PROGRAMS, CHUNK=_CHUNK, num_warps=8)
    return partial


def padded_rows(rows: int) -> int:
    """Columns of a transposed cast of a matrix with so many rows."""
    return -(-rows // 16) * 16
