"""Updates of whole matrices that are sharded (Muon): which rank computes each update, and the bytes of the exchange.

    rank 0   [ A A A A B ]  --all-to-all-->  A A A A A A   owner of A   --all-to-all-->  [ A A A A B ]
    rank 1   [ A A B B B ]                   B B B B       owner of B                    [ A A B B B ]

One rank, the owner, computes the update of a whole matrix: the pieces are sent to it in bfloat16, and the result is
sent back. Each rank owns a share of the matrices, and each update is computed once. Rejected: an all-gather of all
matrices, with which every rank receives all bytes and does all of the work.

Matrices are exchanged in a few parts, one after the other, so that one part travels while another is worked on:

    sent to owners   | part 0 | part 1 |                 | part 2 |
    worked on                          | part 0          | part 1          | part 2 |
    sent back                                            | part 0 |        | part 1 | part 2 |

The plan fixes the owners: in each part matrices are assigned from the largest to the smallest, each to the rank with
the least work. A part has some matrices for each rank, so that none waits long for the others' work. Rejected: an
exchange for each unit, whose few matrices leave most of the ranks without any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zeroshard.mesh import Axes
from zeroshard.plan.groups import GroupPlan, UnitPlan
from zeroshard.plan.plan import Plan
from zeroshard.sharding.layout import FlatLayout, Segment, matrix_shape

WIRE_ITEMSIZE = 2
"""Matrices travel in bfloat16, in which they are worked on."""
MATRICES = "(matrices)"
"""The label of an exchange of matrices in the operation log."""
PARTS = 4
"""Parts of an exchange: what can't hide is the first way of the first one and the last way of the last one."""
_OF_EACH_RANK = 2
"""Matrices that a part has at least for each rank."""


def exchange_parts(layouts: Sequence[FlatLayout]) -> list[range]:
    """Divide the flat groups of one exchange, in the order of their units, into parts of about the same work.

    Args:
        layouts: of the groups, all divided over the same axes.
    """
    if not layouts:
        return []
    work = [sum(map(_work, layout.segments)) for layout in layouts]
    matrices = sum(len(layout.segments) for layout in layouts)
    count = max(1, min(PARTS, matrices // (_OF_EACH_RANK * layouts[0].shards), len(layouts)))
    found: list[range] = []
    start, done = 0, 0.0
    for index in range(len(layouts)):
        done += work[index]
        if index + 1 == len(layouts) or done >= sum(work) * (len(found) + 1) / count:
            found.append(range(start, index + 1))
            start = index + 1
    return found


def with_owners(units: Sequence[UnitPlan], matrices: Sequence[str]) -> list[UnitPlan]:
    """The units with an owner for each of the parameters named in `matrices` that is divided."""
    wanted = set(matrices)
    places: dict[Axes, list[tuple[int, int]]] = {}
    for number, unit in enumerate(units):
        for index, group in enumerate(unit.groups):
            if _is_divided(group) and group.layout.segments[0].name in wanted:
                places.setdefault(unit.axes_of(group), []).append((number, index))
    owners: dict[tuple[int, int], tuple[int, ...]] = {}
    for members in places.values():
        layouts = [units[number].groups[index].layout for number, index in members]
        for part in exchange_parts(layouts):
            found = _owners([layouts[place] for place in part])
            owners.update(zip(members[part.start : part.stop], found, strict=True))
    return [
        replace(
            unit, groups=tuple(_owned_by(group, owners.get((number, index))) for index, group in enumerate(unit.groups))
        )
        for number, unit in enumerate(units)
    ]


def _owners(layouts: Sequence[FlatLayout]) -> list[tuple[int, ...]]:
    """The owners of the matrices of one part, by group and segment."""
    loads = [0.0] * layouts[0].shards
    found = [[0] * len(layout.segments) for layout in layouts]
    jobs = [(_work(s), index, place) for index, each in enumerate(layouts) for place, s in enumerate(each.segments)]
    for cost, index, place in sorted(jobs, key=lambda job: (-job[0], job[1:])):
        owner = loads.index(min(loads))
        loads[owner] += cost
        found[index][place] = owner
    return [tuple(each) for each in found]


def _work(segment: Segment) -> float:
    """What the update of a matrix costs, up to a factor."""
    batch, rows, columns = matrix_shape(segment.shape)
    return float(batch * rows * columns * min(rows, columns))


def _owned_by(group: GroupPlan, owners: Sequence[int] | None) -> GroupPlan:
    return group if owners is None else replace(group, owners=tuple(owners))


def exchange_nbytes(plan: Plan) -> dict[Axes, list[int]]:
    """Bytes that a rank sends on average each way in each part of an exchange, by mesh axes: its share of the part."""
    layouts: dict[Axes, list[FlatLayout]] = {}
    for axes, group in _owned(plan):
        layouts.setdefault(axes, []).append(group.layout)
    return {
        axes: [part_nbytes(members[part.start : part.stop]) for part in exchange_parts(members)]
        for axes, members in layouts.items()
    }


def part_nbytes(layouts: Sequence[FlatLayout]) -> int:
    """Bytes that a rank sends on average each way in a part that has these groups."""
    return -(-sum(layout.parameter_numel for layout in layouts) * WIRE_ITEMSIZE // layouts[0].shards)


def exchange_buffers(plan: Plan) -> int:
    """Bytes of the two buffers of an exchange on the rank that has the most: its pieces, and the matrices it owns.

    A matrix that is not divided needs no exchange: its update is made and applied where it is.
    """
    totals: dict[Axes, list[int]] = {}
    for axes, group in _owned(plan):
        layout = group.layout
        per_rank = totals.setdefault(axes, [0] * layout.shards)
        for rank in range(layout.shards):
            pieces = layout.pieces(*layout.shard_range(rank))
            per_rank[rank] += sum(high - low for _, low, high in pieces)
        for segment, owner in zip(layout.segments, group.owners, strict=True):
            per_rank[owner] += segment.numel
    return sum(max(per_rank) for per_rank in totals.values()) * WIRE_ITEMSIZE


def _owned(plan: Plan) -> Iterator[tuple[Axes, GroupPlan]]:
    for unit, group in plan.groups():
        if group.owners:
            yield unit.axes_of(group), group


def _is_divided(group: GroupPlan) -> bool:
    return group.trainable and bool(group.update_axes) and group.layout.shards > 1 and bool(group.layout.segments)
