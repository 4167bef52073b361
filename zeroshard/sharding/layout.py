"""The flat layout: where each parameter of a unit is in one contiguous buffer, and which shard each rank owns.

    rank 0's shard                        rank 1's shard
    |------------------------------------|------------------------------------|
    | w1 (aligned)         | b1 . | w2 (crosses the border)            | pad    |
    0                      o1     o2                                   n        numel

The flat buffer is the concatenation of the shards in rank order, so an all-gather writes the parameters, and a
reduce-scatter reads the gradients, without a copy before or after. Every parameter and every shard starts at a multiple
of 256 bytes.

Rejected: sharding each parameter along its first dim. It keeps rows whole, but the gathered buffer then interleaves
ranks inside each parameter and needs a copy per gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zeroshard.field_types import check_fields
from zeroshard.sharding.cut import Cut

ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Segment:
    """One parameter's place in a flat buffer: `numel` elements from `offset` on, of the given shape.

    Attributes:
        cut: how the model divides the parameter, `shape` being that of this rank's part; None if it does not.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    cut: Cut | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The parameter's shape in the model as one process has it."""
        return self.shape if self.cut is None else self.cut.whole_shape(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """Segments in a buffer of `numel` elements, divided evenly over `shards` ranks."""

    segments: tuple[Segment, ...]
    numel: int
    shards: int

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    @property
    def parameter_numel(self) -> int:
        """Elements that belong to parameters; the rest is padding."""
        return sum(segment.numel for segment in self.segments)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """The elements [start, end) that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding as (start, end) pairs."""
        found: list[tuple[int, int]] = []
        position = 0
        for segment in self.segments:
            if segment.offset > position:
                found.append((position, segment.offset))
            position = max(position, segment.end)
        if position < self.numel:
            found.append((position, self.numel))
        return tuple(found)

    def pieces(self, start: int, end: int) -> tuple[tuple[int, int, int], ...]:
        """The parts of segments in [start, end): (segment index, first, end), counted from `start`."""
        found: list[tuple[int, int, int]] = []
        for index, segment in enumerate(self.segments):
            low, high = max(segment.offset, start), min(segment.end, end)
            if low < high:
                found.append((index, low - start, high - start))
        return tuple(found)

    def within(self, start: int, end: int) -> tuple[int, ...]:
        """The numbers of the segments that are not empty and lie completely in [start, end)."""
        inside = [start <= segment.offset and segment.end <= end for segment in self.segments]
        return tuple(index for index, segment in enumerate(self.segments) if inside[index] and segment.numel)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """(batch, rows, columns) of a parameter that is updated as a matrix.

    Three dims are a batch of matrices (experts); from four dims on (convolutions) all but the first are columns.
    """
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], math.prod(shape[1:])


def flat_layout(
    parameters: Iterable[tuple[str, Sequence[int]]],
    *,
    shards: int,
    itemsize: int,
    block: int = 1,
    cuts: Mapping[str, Cut] | None = None,
) -> FlatLayout:
    """Place parameters, given as (name, shape) pairs, one after the other in a buffer for `shards` ranks.

    Args:
        itemsize: bytes of an element in the compute dtype.
        block: parameters and shards begin also at multiples of so many elements.
        cuts: how the model divides parameters, by name; missing names are not divided.
    """
    cuts = {} if cuts is None else cuts
    align = math.lcm(max(1, ALIGNMENT_BYTES // itemsize), block)
    segments: list[Segment] = []
    position = 0
    for name, shape in parameters:
        segment = Segment(name, tuple(shape), position, cuts.get(name))
        segments.append(segment)
        position = -(-segment.end // align) * align
    chunk = align * shards
    return FlatLayout(tuple(segments), -(-position // chunk) * chunk, shards)
