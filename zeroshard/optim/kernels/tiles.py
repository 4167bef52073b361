"""Tiles: the pieces in which a kernel walks a flat region, none of which crosses a segment.

A row per tile: first element, one past the last, and the number of its segment, all relative to the region. Per-segment
scalars (learning rate, decay, bias corrections, whether it is updated at all) are then one load per tile.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

TILE = 512
"""Elements per tile; a multiple of every segment's alignment. Measured on an H100: 512 keeps HBM busiest."""


def tile_table(pieces: Iterable[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    """Tiles of (segment, start, end) pieces as int32 of shape (tiles, 3): start, end, segment."""
    parts = [torch.zeros(0, 3, dtype=torch.int32)]
    for segment, start, end in pieces:
        low = torch.arange(start, end, TILE, dtype=torch.int64)
        rows = [low, (low + TILE).clamp(max=end), torch.full_like(low, segment)]
        parts.append(torch.stack(rows, dim=1).to(torch.int32))
    return torch.cat(parts).to(device)
