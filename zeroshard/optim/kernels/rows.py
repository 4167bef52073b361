"""Sum of rows in one pass: adds up the gradients that all ranks sent, for this rank's shard.

    rows (ranks, n) in wire dtype  --float32 sum-->  out (n), or added to it  --square-->  a partial sum for each tile

This rank's own row may be read where autograd left it, from one gradient per parameter; its row in `rows` is not used
then. Bytes per element: 2 per rank read with bf16 on the wire, 2 written (8 more if float32 is accumulated); the
squares of the result need no further read. Rejected: few programs that loop over all tiles, to leave multiprocessors to
the backward; they take far longer, and more processor time in total.
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
    """Elements [low, high) of this rank's shard; its own gradient `source` has them from element `first` on."""

    source: int
    first: int
    low: int
    high: int


@dataclass(frozen=True)
class _Launch:
    """What one launch sums.

    Attributes:
        tiles: int64 (tiles, 4), of each tile: start, end, index into `sources`, first element in that gradient.
        first: number of the first of these tiles among all.
        sources: the numbers of the gradients.
    """

    tiles: torch.Tensor
    first: int
    sources: tuple[int, ...]


class RowSum:
    """The sum of rows for fixed pieces of one rank's shard.

    Args:
        pieces: what is summed; elements outside of them are neither read nor written.
        rank: the number of this rank's own row.
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
            own: this rank's gradients, contiguous, in the dtype of `rows`; None if its row is in `rows`, too.
            add: add to the present values of `out`.
            squares: float64 (tiles,), overwritten with the sums of squares of the new `out`; see `SquaredNorm`.
        """
        assert squares is None or len(squares) == self.tiles
        for launch in self._launches:
            read = None if own is None else [_required(own[number]) for number in launch.sources]
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
    """The same in plain PyTorch: used on a CPU, and the reference for tests of the kernel."""
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


def _required(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient


def _compiled() -> Any:
    from zeroshard.optim.kernels.rows_triton import row_sum

    return row_sum
