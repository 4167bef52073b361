"""Launches the Triton kernels that cast a flat shard of master weights to fp8, on a GPU.

    tiles     for each 256 elements the number of their parameter, -1 for padding
    blocks    int64, (blocks, 3): place of a block's first element in the shard, columns of its parameter, and the
              number of its scale

Parameters of a group in fp8 begin at multiples of 256 elements, so each tile belongs to one parameter. A program whose
tiles belong to one parameter updates its largest magnitude once. A program for a block of 128 x 128 weights reads them
once, and casts them if no other rank has a part of the block; only blocks that borders cut wait for the other ranks.
Rejected: a launch per parameter, some hundred per step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from zeroshard.fp8.recipe import BLOCK

TILE = 256
_TILES = 64
"""Tiles of a program that finds largest magnitudes."""
_TILES_CAST = 8


def find_largest(master: torch.Tensor, tiles: torch.Tensor, largest: torch.Tensor) -> None:
    """Raise `largest` (float32, one per parameter) to the largest magnitudes in this shard."""
    grid = (-(-tiles.numel() // _TILES),)
    _kernels().largest_of_tiles[grid](
        master, tiles, largest.view(torch.int32), master.numel(), tiles.numel(), TILE=TILE, TILES=_TILES, num_warps=8
    )


def write_codes(master: torch.Tensor, tiles: torch.Tensor, largest: torch.Tensor, codes: torch.Tensor) -> None:
    """Write the codes of the shard, with zeros for padding; `largest` are those of whole parameters."""
    grid = (-(-tiles.numel() // _TILES_CAST),)
    _kernels().cast_tiles[grid](
        master,
        tiles,
        largest.view(torch.int32),
        codes,
        master.numel(),
        tiles.numel(),
        TILE=TILE,
        TILES=_TILES_CAST,
        num_warps=4,
    )


def cast_own_blocks(
    master: torch.Tensor, whole: torch.Tensor, cut: torch.Tensor, largest: torch.Tensor, codes: torch.Tensor
) -> None:
    """Write the largest magnitudes of blocks in this shard, and the codes of those that are whole.

    Args:
        whole, cut: blocks that lie in the shard, and blocks of which a part does.
        largest: float32, by number of the scale.
    """
    bits = largest.view(torch.int32)
    if whole.shape[0]:
        _kernels().cast_whole_block[(whole.shape[0],)](master, whole, bits, codes, BLOCK=BLOCK, num_warps=8)
    if cut.shape[0]:
        grid = (cut.shape[0],)
        _kernels().largest_of_cut_block[grid](master, cut, bits, master.numel(), BLOCK=BLOCK, num_warps=8)


def cast_cut_blocks(master: torch.Tensor, cut: torch.Tensor, largest: torch.Tensor, codes: torch.Tensor) -> None:
    """Write the codes of the parts of blocks; `largest` are those of whole blocks."""
    if cut.shape[0]:
        _kernels().cast_cut_block[(cut.shape[0],)](
            master, cut, largest.view(torch.int32), codes, master.numel(), BLOCK=BLOCK, num_warps=8
        )


@cache
def _kernels() -> Any:
    from zeroshard.fp8 import shard_triton

    return shard_triton
