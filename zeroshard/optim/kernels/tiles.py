"""Tiles: the pieces in which a kernel walks a flat region, none of which crosses a segment.

A row per tile: first element, one past the last, and the number of its segment, all relative to the region. Per-segment
scalars (learning rate, decay, bias corrections, whether it is updated at all) are then one load per tile.

Whole tiles begin at multiples of BORDER, so that a kernel may move 16 bytes at once. A piece that begins elsewhere, as
one of streamed state may, gets a short tile first. Under a mask whose end is only known on the device a kernel moves
element by element, at half the rate of the memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

TILE = 1024
"""Elements per tile of an update; measured in decision 0010."""
GRADIENT_TILE = 4096
"""Elements per tile of a sum or of squares of gradients; measured in decision 0011."""
BORDER = 32
"""Elements; where segments and shards begin is a multiple of it (256 bytes, whatever the dtype)."""


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
