"""Launches the kernels that make codes of a flat part of master weights, where Triton is and they are on a GPU.

    tiles     the number of the parameter of each 256 elements, -1 for padding

Parameters begin at multiples of 256 elements of a group in fp8, so that a tile is of one parameter. A program whose
tiles are all of one parameter tells its largest magnitude once. Rejected: a launch per parameter, some hundred a step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

TILE = 256
_TILES = 64
"""Of a program that looks for largest magnitudes."""
_TILES_CAST = 8


def find_largest(master: torch.Tensor, tiles: torch.Tensor, largest: torch.Tensor) -> None:
    """Raise `largest`, of each parameter, to the largest magnitude in this part."""
    grid = (-(-tiles.numel() // _TILES),)
    _kernels().largest_of_tiles[grid](
        master, tiles, largest.view(torch.int32), master.numel(), tiles.numel(), TILE=TILE, TILES=_TILES, num_warps=8
    )


def write_codes(master: torch.Tensor, tiles: torch.Tensor, largest: torch.Tensor, codes: torch.Tensor) -> None:
    """Write the codes of the part; of padding, zeros."""
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
