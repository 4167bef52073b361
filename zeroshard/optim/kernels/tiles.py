"""Tiles: the ranges into which a kernel divides a flat region, none of which crosses a border of segments.

A table has a row per tile: first element, end, and the number of its segment, all relative to the region. So scalars of
a segment (learning rate, decay, bias corrections, whether it is updated at all) need one load per tile.

Whole tiles begin at multiples of BORDER, so that a kernel can load 16 bytes at once. A piece that begins elsewhere, as
streamed state may, gets a short tile first. With a mask that is known only on the device, a kernel loads element by
element, at half the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

TILE = 1024
"""Elements per tile of an update; measured in decision 0010."""
GRADIENT_TILE = 4096
"""Elements per tile of a sum or of squares of gradients; measured in decision 0011."""
BORDER = 32
"""Elements; segments and shards begin at multiples of it (of 256 bytes, whatever the dtype)."""


def tile_table(pieces: Iterable[tuple[int, int, int]], device: torch.device, tile: int = TILE) -> torch.Tensor:
    """Tiles of (segment, start, end) pieces as int64 of shape (tiles, 3): start, end, segment."""
    parts = [torch.zeros(0, 3, dtype=torch.int64)]
    for segment, start, end in pieces:
        border = min(-(-start // BORDER) * BORDER, end)
        if start < border:
            parts.append(torch.tensor([[start, border, segment]]))
        low = torch.arange(border, end, tile, dtype=torch.int64)
        parts.append(torch.stack([low, (low + tile).clamp(max=end), torch.full_like(low, segment)], dim=1))
    return torch.cat(parts).to(device)
