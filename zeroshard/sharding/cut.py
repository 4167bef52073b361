"""How the model divides a parameter over the ranks of a model axis; ZeRO then shards each rank's part over data axes.

    a weight of [4, 6] over tp 2            flat elements of the whole parameter that rank 1 has
    dim 0   [ rank 0 ] [ rank 1 ]           12 ... 23                               1 row  of width 12
    dim 1   columns 0-2 | 3-5               3 4 5 | 9 10 11 | 15 16 17 | 21 22 23   4 rows of width 3

Along whichever dim a parameter is cut, one rank's part is a matrix of `rows` x `width`, and the whole parameter is the
matrices of all ranks side by side. Rejected: one range per dim of the parameter, which needs more code for the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroshard.field_types import check_fields


@dataclass(frozen=True)
class Cut:
    """How one dim of a parameter is divided along one mesh axis.

    Attributes:
        axis: name of the mesh axis.
        dim: the dim of the parameter that is divided.
        ranks: number of ranks along the axis; each has an equal part of the dim.
        blocks: the dim consists of so many equal blocks (query, key and value in one weight), and each rank has its
            part of each block.
    """

    axis: str
    dim: int
    ranks: int
    blocks: int = 1

    def __post_init__(self) -> None:
        check_fields(self)

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole parameter, from that of a rank's part."""
        return tuple(size * self.ranks if dim == self.dim else size for dim, size in enumerate(part))

    def rows(self, part: Sequence[int]) -> int:
        """Rows of a rank's part; each is a contiguous range of the whole parameter."""
        return math.prod(part[: self.dim]) * self.blocks

    def width(self, part: Sequence[int]) -> int:
        """Elements of a row of a rank's part."""
        return math.prod(part[self.dim :]) // self.blocks

    def join(self, parts: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The whole parameter, from the flat parts of all ranks one after the other; `shape` is that of a part."""
        rows, width = self.rows(shape), self.width(shape)
        return parts.view(self.ranks, rows, width).transpose(0, 1).reshape(self.whole_shape(shape))

    def part(self, whole: torch.Tensor, shape: Sequence[int], rank: int) -> torch.Tensor:
        """The flat part of one rank of the axis, from the whole parameter; `shape` is that of a part."""
        rows, width = self.rows(shape), self.width(shape)
        return whole.reshape(rows, self.ranks, width)[:, rank].reshape(-1)

    def stripes(self, shape: Sequence[int], rank: int) -> Stripes:
        """Where the elements of a rank's part are in the whole parameter; `shape` is that of a part."""
        return Stripes(rank, self.ranks, self.width(shape))


@dataclass(frozen=True)
class Stripes:
    """The elements of a whole flat tensor that one rank has: a range of `width` in each row of `ranks * width`.

    Attributes:
        rank: the rank's position along the axis of the cut, which is also that of its range in a row.
    """

    rank: int
    ranks: int
    width: int

    def in_whole(self, index: int) -> int:
        """The position in the whole tensor of an element of the rank's part."""
        row, column = divmod(index, self.width)
        return (row * self.ranks + self.rank) * self.width + column

    def before(self, index: int) -> int:
        """How many elements of the rank's part come before position `index` of the whole tensor."""
        row, column = divmod(index, self.ranks * self.width)
        return row * self.width + min(max(column - self.rank * self.width, 0), self.width)
