"""Sum of rows in one pass: what each rank sent of its gradients, into this rank's part of the gradient.

    rows (ranks, n) in wire dtype  --float32 sum-->  out (n), or added to it

Bytes per element: 2 per rank read with bf16 on the wire, 2 written (8 more where float32 is accumulated). Rejected: few
programs that walk all tiles to leave processors to the backward; they take far longer, and more processor time in all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

ROW_TILE = 4096


def row_tiles(pieces: Iterable[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Tiles of (start, end) pieces as int64 of shape (tiles, 2)."""
    parts = [torch.zeros(0, 2, dtype=torch.int64)]
    for start, end in pieces:
        low = torch.arange(start, end, ROW_TILE, dtype=torch.int64)
        parts.append(torch.stack([low, (low + ROW_TILE).clamp(max=end)], dim=1))
    return torch.cat(parts).to(device)


def sum_rows(rows: torch.Tensor, out: torch.Tensor, tiles: torch.Tensor, *, add: bool, dense: bool) -> None:
    """Sum `rows` (ranks, n) in float32, in the order of the ranks, into the tiles of `out` (n).

    Args:
        tiles: see `row_tiles`; elements outside of them are neither read nor written.
        add: add to what is in `out`.
        dense: whether the tiles cover everything.
    """
    if not tiles.shape[0]:
        return
    if dense and not add and rows.shape[0] == 2 and rows.dtype == out.dtype:
        torch.add(rows[0], rows[1], out=out)  # torch's own kernel does this one at the full rate of the memory
        return
    if rows.is_cuda:
        _compiled()[(tiles.shape[0],)](
            rows, out, tiles, rows.shape[1], RANKS=rows.shape[0], ADD=add, TILE=ROW_TILE, num_warps=8
        )
        return
    sum_rows_twin(rows, out, tiles, add=add)


def sum_rows_twin(rows: torch.Tensor, out: torch.Tensor, tiles: torch.Tensor, *, add: bool) -> None:
    """The same in plain PyTorch: the kernel's oracle, and what runs on a CPU."""
    exact = torch.float64 if rows.dtype == torch.float64 else torch.float32
    for low, high in tiles.tolist():
        total = rows[0, low:high].to(exact)
        for row in rows[1:]:
            total = total + row[low:high].to(exact)
        out[low:high] = (out[low:high].to(exact) + total if add else total).to(out.dtype)


def _compiled() -> Any:
    from zeroshard.optim.kernels.rows_triton import row_sum

    return row_sum
