"""Casts matrices to fp8 with a scale for each tile of 1 x 128 values, or for each block of 128 x 128.

    cast_tiles    inputs and gradients: a tile lies along the dim that the product sums over, so the transposed codes
                  have other tiles, scales and roundings than the straight ones
    cast_blocks   weights: the transposed codes have the same blocks

Scales are those of `cast`. Unscales of tiles, (rows, columns / 128), lie column by column, as products on a GPU take
them. A tile's scale depends on the tile alone: a kernel reads a matrix once for both casts, where scales of whole
tensors need two passes. All implementations give the same bits.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from zeroshard.fp8 import meta_casts
from zeroshard.fp8.cast import scale_and_unscale, spread, to_codes, transpose
from zeroshard.fp8.recipe import BLOCK

Operand = tuple[torch.Tensor, torch.Tensor]
"""Codes and unscales of a matrix."""

# Imported here, since torch.compile can trace neither an import nor a function with a cache.
_KERNELS: ModuleType | None = import_module("zeroshard.fp8.block_kernels") if find_spec("triton") is not None else None


def cast_tiles(values: torch.Tensor, kind: torch.dtype) -> Operand:
    """Codes of a matrix (rows, columns), and the unscales of its tiles (rows, columns / 128)."""
    if values.is_meta:
        return meta_casts.cast_tiles(values, kind)
    if _KERNELS is not None and _by_kernel(values):
        return _KERNELS.cast_tiles(values, kind)
    rows, columns = values.shape
    wide = values.float()
    largest = wide.view(rows, columns // BLOCK, BLOCK).abs().amax(dim=2)
    scale, unscale = scale_and_unscale(largest, kind)
    return to_codes(wide, spread(scale, wide.shape), kind), unscale.t().contiguous().t()


def cast_tiles_both(values: torch.Tensor, kind: torch.dtype) -> tuple[Operand, Operand]:
    """As `cast_tiles`, of a matrix and of the transposed one, with rows padded with zeros to a multiple of 128."""
    if values.is_meta:
        return meta_casts.cast_tiles_both(values, kind)
    if _KERNELS is not None and _by_kernel(values):
        return _KERNELS.cast_tiles_both(values, kind)
    missing = -values.shape[0] % BLOCK
    turned = torch.nn.functional.pad(values.t(), (0, missing)).contiguous()
    return cast_tiles(values, kind), cast_tiles(turned, kind)


def cast_blocks(values: torch.Tensor, kind: torch.dtype) -> Operand:
    """Codes of a matrix (rows, columns), both multiples of 128, and the unscales of its blocks."""
    if values.is_meta:
        return meta_casts.cast_blocks(values, kind)
    if _KERNELS is not None and _by_kernel(values):
        return _KERNELS.cast_blocks(values, kind)
    rows, columns = values.shape
    wide = values.float()
    largest = wide.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).abs().amax(dim=(1, 3))
    scale, unscale = scale_and_unscale(largest, kind)
    return to_codes(wide, spread(scale, wide.shape), kind), unscale


def transpose_blocks(operand: Operand) -> Operand:
    """The transposed codes of a weight, and their unscales."""
    codes, unscale = operand
    return transpose(codes), unscale.t().contiguous()


def _by_kernel(values: torch.Tensor) -> bool:
    return values.is_cuda and values.numel() > 0
