"""Launches the Triton kernels that cast a flat shard of master weights to fp8, on a GPU.

    tiles     for each 256 elements the number of their parameter, -1 for padding

Parameters of a group in fp8 begin at multiples of 256 elements, so each tile belongs to one parameter. A program whose
tiles belong to one parameter updates its largest magnitude once. Rejected: a launch per parameter, some hundred per
step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

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


@cache
def _kernels() -> Any:
    from zeroshard.fp8 import shard_triton

    return shard_triton
