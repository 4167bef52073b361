"""Launches the Triton kernels of the casts with scales by tile or block, for values on a GPU.

Each program casts 128 x 128 values, of which it finds all scales itself: one launch, and one read of the values.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroshard.fp8 import block_triton
from zeroshard.fp8.recipe import BLOCK

KERNELS: Any = block_triton

_WARPS = 8
_E5M2 = {torch.float8_e4m3fn: False, torch.float8_e5m2: True}

_Operand = tuple[torch.Tensor, torch.Tensor]


def cast_tiles(values: torch.Tensor, kind: torch.dtype) -> _Operand:
    """See block_casts.cast_tiles."""
    return _cast(values, kind, transposed=False)[0]


def cast_tiles_both(values: torch.Tensor, kind: torch.dtype) -> tuple[_Operand, _Operand]:
    """See block_casts.cast_tiles_both."""
    return _cast(values, kind, transposed=True)


def cast_blocks(values: torch.Tensor, kind: torch.dtype) -> _Operand:
    """See block_casts.cast_blocks."""
    values = values.contiguous()
    rows, columns = values.shape
    codes = torch.empty((rows, columns), dtype=kind, device=values.device)
    unscale = torch.empty((rows // BLOCK, columns // BLOCK), dtype=torch.float32, device=values.device)
    grid = (rows // BLOCK, columns // BLOCK)
    KERNELS.cast_block[grid](values, codes, unscale, columns, BLOCK=BLOCK, E5M2=_E5M2[kind], num_warps=_WARPS)
    return codes, unscale


def _cast(values: torch.Tensor, kind: torch.dtype, *, transposed: bool) -> tuple[_Operand, _Operand]:
    """The cast matrix, and the transposed one (without elements unless `transposed`)."""
    values = values.contiguous()
    rows, columns = values.shape
    padded = -(-rows // BLOCK) * BLOCK
    codes = torch.empty((rows, columns), dtype=kind, device=values.device)
    turned = torch.empty((columns, padded) if transposed else (0, 0), dtype=kind, device=values.device)
    unscale = torch.empty((columns // BLOCK, rows), dtype=torch.float32, device=values.device)
    of_turned = torch.empty(
        (padded // BLOCK, columns) if transposed else (0, 0), dtype=torch.float32, device=values.device
    )
    KERNELS.cast_tile_both[(padded // BLOCK, columns // BLOCK)](
        values,
        codes,
        unscale,
        turned,
        of_turned,
        rows,
        columns,
        padded,
        BLOCK=BLOCK,
        E5M2=_E5M2[kind],
        TRANSPOSED=transposed,
        num_warps=_WARPS,
    )
    return (codes, unscale.t()), (turned, of_turned.t())
