"""Flat ranges of a tensor as rectangles, which is what torch.distributed.checkpoint knows.

    a matrix, and elements [start, stop) of it in row-major order:

    . . . . 1 1 1      at most three rectangles: the end of a row,
    2 2 2 2 2 2 2                                whole rows,
    2 2 2 2 2 2 2
    3 3 3 . . . .                                the begin of a row

Each rectangle is again one contiguous flat range, so it is written and read without gathering strided memory. n dims
give at most 2n-1 rectangles. Rejected: one entry per row, which needs an entry per row; and shards that follow the
first dim, which a flat layout doesn't have.
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
    """The fewest rectangles that make up flat elements [start, stop) of a tensor, in order.

    A tensor without elements is one rectangle without elements.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"[{start}, {stop}) is no range of a tensor of shape {list(shape)}")
    if math.prod(shape) == 0:
        return [Rectangle((0,) * len(shape), tuple(shape), 0, 0)]
    return list(_cut(tuple(shape), start, stop, (), 0))


def _cut(shape: tuple[int, ...], start: int, stop: int, outer: tuple[int, ...], base: int) -> Iterator[Rectangle]:
    """`outer` are the indices of the dims before `shape`, and `base` the flat element at which that part begins."""
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
