"""Updates of matrices from low-rank factors (Dion): the rank of the factors, and the bytes that they take on the wire.

    matrix B (rows x columns) ~ left (rows x rank) x right (columns x rank)'

    each rank    its part of the right factor  --all-reduce-->  right
                 its rows of B right           --all-reduce-->  left, made orthonormal by every rank
                 its rows of B' left           --all-reduce-->  the next right factor

A rank multiplies only what it has of a matrix, so the work on the matrix is divided as its elements are, and only
factors travel. Sums over ranks are float64: their order then changes no digit that float32 state keeps. The right
factor rests in float32 among the optimizer's state, divided as the rest, and is put together by adding zeros.

A matrix that lies on one rank as a whole is updated there, and nothing of it travels: of a stack of matrices (experts)
only those on the borders between ranks are summed, fewer than there are ranks.

Matrices go in parts, each of a few matrices, through a pipeline of four steps:

    right factor  | part 0 | part 1 | part 2 | part 3 | ...
    left          |        | part 0 | part 1 | part 2 |
    next right    |        |        | part 0 | part 1 |
    update        |        |        |        | part 0 |

Each step of a part computes while what other parts' steps have sent is on its way. There are four buffers, which the
parts use in turn. Rejected: buffers for all parts at once, as for the pieces of whole matrices (`plan.matrices`):
factors are whole on every rank, so these would not become smaller with more ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zeroshard.mesh import Axes
from zeroshard.plan.groups import GroupPlan, UnitPlan
from zeroshard.plan.plan import Plan
from zeroshard.sharding.layout import FlatLayout, matrix_shape

FACTORS = "(factors)"
"""The label of sums of factors in the operation log."""
RIGHT_ITEMSIZE = 4
SUM_ITEMSIZE = 8
IN_FLIGHT = 4
"""Parts that have buffers at one time, one for each step of the pipeline."""
_PART_NBYTES = 64 << 20
_PARTS = 4
"""Parts that there are at least, so that one travels while another is worked on; fewer if there are fewer matrices."""


@dataclass(frozen=True)
class Factors:
    """Sizes of the factors of a parameter: a stack of `batch` matrices of rows x columns."""

    batch: int
    rows: int
    columns: int
    rank: int

    @property
    def numel(self) -> int:
        """Elements of one matrix."""
        return self.rows * self.columns

    @property
    def left_numel(self) -> int:
        return self.batch * self.rows * self.rank

    @property
    def right_numel(self) -> int:
        return self.batch * self.columns * self.rank

    @property
    def nbytes(self) -> int:
        """Bytes of the right factor, the left one, and the next right one."""
        return self.right_numel * (RIGHT_ITEMSIZE + SUM_ITEMSIZE) + self.left_numel * SUM_ITEMSIZE


def factors_of(shape: Sequence[int], rank: int) -> Factors:
    """The sizes for a parameter of this shape."""
    return Factors(*matrix_shape(shape), rank)


def factor_rank(shape: Sequence[int], fraction: float) -> int:
    """The rank of a parameter's factors: a fraction of the lesser of rows and columns, 1 at least."""
    _, rows, columns = matrix_shape(shape)
    most = min(rows, columns)
    return min(most, max(1, math.ceil(fraction * most)))


def spread_matrices(layout: FlatLayout, ranks: Sequence[int]) -> list[tuple[int, int, Factors]]:
    """The matrices of a flat group that lie on several ranks: segment, place in its stack, sizes of the factors."""
    found: list[tuple[int, int, Factors]] = []
    for index, (segment, rank) in enumerate(zip(layout.segments, ranks, strict=True)):
        sizes = factors_of(segment.shape, rank)
        first = (segment.offset // layout.shard_numel + 1) * layout.shard_numel if layout.shard_numel else segment.end
        borders = range(first - segment.offset, segment.numel, max(1, layout.shard_numel))
        cut = {border // sizes.numel: None for border in borders if border % sizes.numel}
        found += [(index, matrix, replace(sizes, batch=1)) for matrix in cut]
    return found


def factor_parts(factors: Sequence[Factors]) -> list[range]:
    """Divide the matrices of one pipeline, in the order of their units, into parts."""
    limit = min(_PART_NBYTES, -(-sum(each.nbytes for each in factors) // _PARTS))
    found: list[range] = []
    start = held = 0
    for index, each in enumerate(factors):
        if index > start and held + each.nbytes > limit:
            found.append(range(start, index))
            start, held = index, 0
        held += each.nbytes
    return [*found, range(start, len(factors))] if factors else []


def part_nbytes(factors: Sequence[Factors]) -> tuple[int, int, int]:
    """Bytes of the three sums of a part: right factors, left factors, next right factors."""
    right, left = sum(each.right_numel for each in factors), sum(each.left_numel for each in factors)
    return right * RIGHT_ITEMSIZE, left * SUM_ITEMSIZE, right * SUM_ITEMSIZE


def buffer_nbytes(factors: Sequence[Factors]) -> int:
    """Bytes of the buffers of one pipeline, each as large as the largest part needs."""
    parts = [sum(part_nbytes(factors[part.start : part.stop])) for part in factor_parts(factors)]
    return min(len(parts), IN_FLIGHT) * max(parts, default=0)


def with_factor_ranks(units: Sequence[UnitPlan], ranks: Mapping[str, int]) -> list[UnitPlan]:
    """The units with the ranks of the factors of the parameters that are named in `ranks`."""
    return [replace(unit, groups=tuple(_ranked(group, ranks) for group in unit.groups)) for unit in units]


def _ranked(group: GroupPlan, ranks: Mapping[str, int]) -> GroupPlan:
    names = [segment.name for segment in group.layout.segments]
    if not group.trainable or not names or names[0] not in ranks:
        return group
    return replace(group, factor_ranks=tuple(ranks[name] for name in names))


def factor_nbytes(plan: Plan) -> dict[Axes, list[tuple[int, int, int]]]:
    """Bytes of the three sums of each part of a pipeline, by mesh axes."""
    return {
        axes: [part_nbytes(members[part.start : part.stop]) for part in factor_parts(members)]
        for axes, members in _divided(plan).items()
    }


def factor_buffers(plan: Plan) -> int:
    """Bytes of the buffers of all pipelines on each rank."""
    return sum(map(buffer_nbytes, _divided(plan).values()))


def _divided(plan: Plan) -> dict[Axes, list[Factors]]:
    found: dict[Axes, list[Factors]] = {}
    for axes, group in _groups(plan):
        found.setdefault(axes, []).extend(sizes for *_, sizes in spread_matrices(group.layout, group.factor_ranks))
    return {axes: members for axes, members in found.items() if members}


def _groups(plan: Plan) -> Iterator[tuple[Axes, GroupPlan]]:
    for unit, group in plan.groups():
        if group.factor_ranks and group.updated_in_parts:
            yield unit.axes_of(group), group
