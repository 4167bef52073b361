"""Tiles: the pieces in which a kernel walks a flat region, none of which crosses a segment.

A row per tile: first element, one past the last, and the number of its segment, all relative to the region. Per-segment
scalars (learning rate, decay, bias corrections, whether it is updated at all) are then one load per tile.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

TILE = 4096
"""Elements per tile; a multiple of every segment's alignment."""


def tile_table(pieces: Iterable[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    """Tiles of (segment, start, end) pieces as int64 of shape (tiles, 3): start, end, segment."""
    rows = [(low, min(low + TILE, end), segment) for segment, start, end in pieces for low in range(start, end, TILE)]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).to(device)
