"""How a parameter is divided over the ranks of a model axis, before ZeRO divides what each of them has over data axes.

    a weight of [4, 6] over tp 2            flat elements of the whole that rank 1 has
    dim 0   [ rank 0 ] [ rank 1 ]           12 ... 23                               1 row  of width 12
    dim 1   columns 0-2 | 3-5               3 4 5 | 9 10 11 | 15 16 17 | 21 22 23   4 rows of width 3

Along whichever dim a parameter is cut, what one rank has is a matrix of `rows` x `width`, and the whole is the
matrices of all ranks side by side. Rejected: rectangles in as many dims as the parameter has, which say the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cut:
    """One axis of ranks along which each has a part of a parameter.

    Attributes:
        axis: of the mesh.
        dim: of the parameter that is divided.
        ranks: along the axis; each has as many elements of the dim.
        blocks: the dim is as many blocks one after the other (query, key and value in one weight), and each rank has
            its part of each block.
    """

    axis: str
    dim: int
    ranks: int
    blocks: int = 1

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole parameter, from that of a rank's part."""
        return tuple(size * self.ranks if dim == self.dim else size for dim, size in enumerate(part))

    def rows(self, part: Sequence[int]) -> int:
        """Rows of a rank's part, each of which is a connected range of the whole."""
        return math.prod(part[: self.dim]) * self.blocks

    def width(self, part: Sequence[int]) -> int:
        """Elements of such a row."""
        return math.prod(part[self.dim :]) // self.blocks

    def join(self, parts: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The whole, from the flat parts of all ranks one after the other; `shape` is that of a part."""
        rows, width = self.rows(shape), self.width(shape)
        return parts.view(self.ranks, rows, width).transpose(0, 1).reshape(self.whole_shape(shape))

    def part(self, whole: torch.Tensor, shape: Sequence[int], rank: int) -> torch.Tensor:
        """The flat part of a rank of the axis, from the whole."""
        rows, width = self.rows(shape), self.width(shape)
        return whole.reshape(rows, self.ranks, width)[:, rank].reshape(-1)

    def stripes(self, shape: Sequence[int], rank: int) -> Stripes:
        """Where the elements of a rank's part are in the whole."""
        return Stripes(rank, self.ranks, self.width(shape))


@dataclass(frozen=True)
class Stripes:
    """The elements of a whole flat tensor that one rank has: of each row of `ranks` times `width` those of its number.

    Attributes:
        rank: along the axis of the cut.
    """

    rank: int
    ranks: int
    width: int

    def in_whole(self, index: int) -> int:
        """Where an element of the rank's part is in the whole."""
        row, column = divmod(index, self.width)
        return (row * self.ranks + self.rank) * self.width + column

    def before(self, index: int) -> int:
        """How many elements of the rank's part come before an element of the whole."""
        row, column = divmod(index, self.ranks * self.width)
        return row * self.width + min(max(column - self.rank * self.width, 0), self.width)
