"""Sum of rows in one pass: what each rank sent of its gradients, into this rank's part of the gradient.

    rows (ranks, n) in wire dtype  --float32 sum-->  out (n), or added to it  --square-->  a partial sum for each tile

This rank's own row may be where autograd left it, in one gradient per parameter, and its row in the inbox empty. Bytes
per element: 2 per rank read with bf16 on the wire, 2 written (8 more where float32 is accumulated); the squares, made
of what is written, cost no read. Rejected: few programs that walk all tiles to leave processors to the backward; they
take far longer, and more processor time in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.optim.kernels.tiles import BORDER, GRADIENT_TILE, tile_table

SOURCES = 8
"""Gradients that one launch can read."""


@dataclass(frozen=True)
class OwnPiece:
    """Elements [low, high) of this rank's part: in its own gradients, those of number `source` from `first` on."""

    source: int
    first: int
    low: int
    high: int


@dataclass(frozen=True)
class _Launch:
    """Tiles that one launch sums: int64 (tiles, 4): low, end, which of `sources`, first element there.

    Attributes:
        first: number of the first of these tiles among all.
        sources: the numbers of the gradients.
    """

    tiles: torch.Tensor
    first: int
    sources: tuple[int, ...]


class RowSum:
    """The sum of rows for fixed pieces of one rank's part.

    Args:
        pieces: what is summed; elements outside of them are neither read nor written.
        rank: which of the rows is this rank's own.
    """

    def __init__(self, pieces: Sequence[OwnPiece], rank: int, device: torch.device) -> None:
        assert not any((piece.first - piece.low) % BORDER for piece in pieces)
        self._rank = rank
        self._launches: list[_Launch] = []
        first = 0
        for start in range(0, len(pieces), SOURCES):
            some = pieces[start : start + SOURCES]
            tiles = tile_table(((n, piece.low, piece.high) for n, piece in enumerate(some)), device, GRADIENT_TILE)
            offsets = torch.tensor([piece.first - piece.low for piece in some], device=device)
            table = torch.cat([tiles, (tiles[:, 0] + offsets[tiles[:, 2]]).unsqueeze(1)], dim=1)
            self._launches.append(_Launch(table, first, tuple(piece.source for piece in some)))
            first += len(table)
        self.tiles = first

    def __call__(
        self,
        rows: torch.Tensor,
        out: torch.Tensor,
        *,
        own: Sequence[torch.Tensor | None] | None = None,
        add: bool = False,
        squares: torch.Tensor | None = None,
    ) -> None:
        """Sum `rows` (ranks, n) in float32, in the order of the ranks, into the pieces of `out` (n).

        Args:
            own: this rank's gradients, contiguous, in the dtype of `rows`; None: its row is in `rows` too.
            add: add to what is in `out`.
            squares: float64 (tiles,), which gets the sums of squares of what is written; see `SquaredNorm`.
        """
        assert squares is None or len(squares) == self.tiles
        for launch in self._launches:
            read = None if own is None else [_there(own[number]) for number in launch.sources]
            count = len(launch.tiles)
            partial = None if squares is None else squares[launch.first : launch.first + count]
            if not rows.is_cuda:
                sum_rows_twin(rows, out, launch.tiles, self._rank, own=read, add=add, squares=partial)
                continue
            sources = [rows] if read is None else read
            sources = [sources[min(number, len(sources) - 1)] for number in range(SOURCES)]
            _compiled()[(count,)](
                *sources,
                rows,
                out,
                out if partial is None else partial,
                launch.tiles,
                rows.shape[1],
                RANKS=rows.shape[0],
                OWN=-1 if own is None else self._rank,
                ADD=add,
                SQUARE=partial is not None,
                TILE=GRADIENT_TILE,
                num_warps=8,
            )


def sum_rows_twin(
    rows: torch.Tensor,
    out: torch.Tensor,
    tiles: torch.Tensor,
    rank: int,
    *,
    own: Sequence[torch.Tensor] | None,
    add: bool,
    squares: torch.Tensor | None,
) -> None:
    """The same in plain PyTorch: the kernel's oracle, and what runs on a CPU."""
    exact = torch.float64 if rows.dtype == torch.float64 else torch.float32
    for place, (low, high, source, first) in enumerate(tiles.tolist()):
        parts = [row[low:high] for row in rows]
        if own is not None:
            parts[rank] = own[source].view(-1)[first : first + high - low]
        total = parts[0].to(exact)
        for part in parts[1:]:
            total = total + part.to(exact)
        out[low:high] = (out[low:high].to(exact) + total if add else total).to(out.dtype)
        if squares is not None:
            squares[place] = out[low:high].double().square().sum()


def _there(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient


def _compiled() -> Any:
    from zeroshard.optim.kernels.rows_triton import row_sum

    return row_sum
