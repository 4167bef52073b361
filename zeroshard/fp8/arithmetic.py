"""What an fp8 layer does with its operands, for scales per tensor and per block: cast, turn and multiply.

                  tensorwise                           blockwise
    input         e4m3, one scale                      e4m3, a scale per 128 values along the dim that is summed over
    gradient      e5m2, one scale                      e4m3, the same
    weight        e4m3, one scale                      e4m3, a scale per block of 128 x 128
    transposed    the same codes and scale             input and gradient: cast for themselves; weight: the same codes

Scales per row are not here: a weight with these has other codes in the backward than in the forward.
"""

from __future__ import annotations

import torch

from zeroshard.fp8.block_casts import Operand, cast_blocks, cast_tiles, cast_tiles_both, transpose_blocks
from zeroshard.fp8.cast import GRADIENTS, VALUES, cast, cast_both, transpose
from zeroshard.fp8.products import product, product_of_blocks


def cast_operand(values: torch.Tensor, kind: torch.dtype, *, by_block: bool) -> Operand:
    """An input or a gradient, of shape (rows, columns)."""
    return cast_tiles(values, kind) if by_block else cast(values, kind)


def cast_operands(values: torch.Tensor, kind: torch.dtype, *, by_block: bool) -> tuple[Operand, Operand]:
    """An input or a gradient, and the transposed one, whose rows are padded with zeros."""
    if by_block:
        return cast_tiles_both(values, kind)
    codes, turned, unscale = cast_both(values, kind)
    return (codes, unscale), (turned, unscale)


def cast_weight(weight: torch.Tensor, *, by_block: bool) -> Operand:
    """A weight, of shape (out_features, in_features)."""
    return cast_blocks(weight, VALUES) if by_block else cast(weight, VALUES)


def turn_weight(weight: Operand, *, by_block: bool) -> Operand:
    """The transposed weight."""
    return transpose_blocks(weight) if by_block else (transpose(weight[0]), weight[1])


def format_of_gradients(*, by_block: bool) -> torch.dtype:
    """The format of gradients; with scales for few values, those need fewer orders of magnitude."""
    return VALUES if by_block else GRADIENTS


def multiply(a: Operand, b: Operand, dtype: torch.dtype, *, by_block: bool, fast: bool = False) -> torch.Tensor:
    """The product a @ b.T in `dtype`; see `product`."""
    return product_of_blocks(*a, *b, dtype) if by_block else product(*a, *b, dtype, fast=fast)
