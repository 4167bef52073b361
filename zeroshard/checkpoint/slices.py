"""Divides flat ranges of a tensor into rectangles, the only parts of tensors that torch.distributed.checkpoint has.

    a matrix, and elements [start, stop) of it in row-major order:

    . . . . 1 1 1      at most three rectangles: the end of a row,
    2 2 2 2 2 2 2                                whole rows,
    2 2 2 2 2 2 2
    3 3 3 . . . .                                the beginning of a row

Each rectangle is itself a contiguous flat range, so it is written and read without strides. A range of a tensor of n
dims has at most 2n-1 rectangles. Rejected: one rectangle per row, which are too many; and shards along the first dim,
which a flat layout does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """Elements [offset, offset + size) in each dim of a tensor, which are its flat elements [start, stop)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """The fewest rectangles that are flat elements [start, stop) of a tensor, in order.

    A tensor without elements has one rectangle without elements. Raises ValueError for a wrong range.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"[{start}, {stop}) is no range of a tensor of shape {list(shape)}")
    if math.prod(shape) == 0:
        return [Rectangle((0,) * len(shape), tuple(shape), 0, 0)]
    return list(_cut(tuple(shape), start, stop, (), 0))


def _cut(shape: tuple[int, ...], start: int, stop: int, outer: tuple[int, ...], base: int) -> Iterator[Rectangle]:
    """As `rectangles`; `outer` are indices in dims before `shape`, `base` the flat number of its first element."""
    if start == stop:
        return
    if not shape:
        yield Rectangle(outer, (1,) * len(outer), base, base + 1)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        inside = last * row
        yield from _cut(shape[1:], start - inside, stop - inside, (*outer, last), base + inside)
        return
    if start < first * row:
        inside = (first - 1) * row
        yield from _cut(shape[1:], start - inside, row, (*outer, first - 1), base + inside)
    if first < last:
        sizes = ((1,) * len(outer)) + (last - first, *shape[1:])
        offsets = (*outer, first, *(0 for _ in shape[1:]))
        yield Rectangle(offsets, sizes, base + first * row, base + last * row)
    if last * row < stop:
        yield from _cut(shape[1:], 0, stop - last * row, (*outer, last), base + last * row)


def flat_start(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """The flat number of the element at `offsets`."""
    position = 0
    for size, offset in zip(shape, offsets, strict=True):
        position = position * size + offset
    return position
