"""The rows of a matrix, or of a stack of matrices, that a rank has a part of: what it multiplies by factors.

    a stack of 3 matrices, and the elements of this rank (#)         the blocks

    . . . . .   . . # # #                                             rows 0-2 of matrix 0 (padded to whole rows)
    . . . # #   # # # # #    # # # # #   # . . . .                    all rows of matrix 1
    # # # # #   # # # # #    # # # # #   . . . . .                    row 0 of matrix 2 (padded)

A rank's part may begin and end within a row: what it lacks of these rows counts as zeros. Sums over ranks then make
products of whole matrices of products of such blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zeroshard.plan.factors import Factors

_MOST = 1 << 24
"""Elements of a block, of which a few float64 copies are made."""


def stacks_of(low: int, high: int, sizes: Factors) -> list[tuple[int, int]]:
    """The matrices (first, after the last) that lie within the elements [low, high) of a parameter, some at a time."""
    if not sizes.numel:
        return []
    first, last, count = -(-low // sizes.numel), high // sizes.numel, max(1, _MOST // sizes.numel)
    return [(start, min(last, start + count)) for start in range(first, last, count)]


@dataclass(frozen=True)
class Block:
    """Equally many rows of consecutive matrices of a stack.

    Attributes:
        matrices: the matrices of the stack.
        rows: rows of each of them.
        columns: columns of the matrices.
        low, high: the elements that this rank has of these rows, counted from its first element of the stack.
        lead: elements of the first row that it does not have.
    """

    matrices: slice
    rows: slice
    columns: int
    low: int
    high: int
    lead: int

    def padded(self, flat: torch.Tensor) -> torch.Tensor:
        """The rows as float64 (matrices, rows, columns), with zeros for what this rank does not have.

        Args:
            flat: this rank's elements of the stack.
        """
        shape = (self.matrices.stop - self.matrices.start, self.rows.stop - self.rows.start, self.columns)
        whole = shape[0] * shape[1] * shape[2]
        if self.high - self.low == whole:
            return flat[self.low : self.high].double().view(shape)
        found = torch.zeros(whole, dtype=torch.float64, device=flat.device)
        found[self.lead : self.lead + self.high - self.low] = flat[self.low : self.high]
        return found.view(shape)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's elements of rows (matrices, rows, columns), flat."""
        return rows.reshape(-1)[self.lead : self.lead + self.high - self.low]


def blocks_of(low: int, high: int, sizes: Factors) -> list[Block]:
    """The blocks of the elements [low, high) of a stack."""
    found: list[Block] = []
    for first, last, top, bottom in _runs(low, high, sizes):
        start = (first * sizes.rows + top) * sizes.columns
        end = ((last - 1) * sizes.rows + bottom) * sizes.columns
        begin, stop = max(start, low), min(end, high)
        found.append(
            Block(slice(first, last), slice(top, bottom), sizes.columns, begin - low, stop - low, begin - start)
        )
    return found


def _runs(low: int, high: int, sizes: Factors) -> Iterator[tuple[int, int, int, int]]:
    """(first matrix, matrix after the last, first row, row after the last) of each block."""
    per = sizes.rows * sizes.columns
    most_rows, most_matrices = max(1, _MOST // sizes.columns), max(1, _MOST // per)
    matrix = low // per
    while matrix * per < high:
        begin, end = max(low - matrix * per, 0), min(high - matrix * per, per)
        whole = (high - matrix * per) // per
        if begin == 0 and whole and per <= _MOST:
            count = min(whole, most_matrices)
            yield matrix, matrix + count, 0, sizes.rows
            matrix += count
            continue
        bottom = -(-end // sizes.columns)
        for top in range(begin // sizes.columns, bottom, most_rows):
            yield matrix, matrix + 1, top, min(bottom, top + most_rows)
        matrix += 1
