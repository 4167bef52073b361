"""Updates of whole matrices that are sharded (Muon): which rank computes each update, and the bytes of the exchange.

    rank 0   [ A A A A B ]  --all-to-all-->  A A A A A A   owner of A   --all-to-all-->  [ A A A A B ]
    rank 1   [ A A B B B ]                   B B B B       owner of B                    [ A A B B B ]

One rank, the owner, computes the update of a whole matrix: the pieces are sent to it in bfloat16, and the result is
sent back. Each rank owns a share of the matrices, and each update is computed once. Rejected: an all-gather of all
matrices, with which every rank receives all bytes and does all of the work.

The plan fixes the owners: matrices are assigned from the largest to the smallest, each to the rank with the least work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zeroshard.mesh import Axes
from zeroshard.plan.groups import GroupPlan, UnitPlan
from zeroshard.plan.plan import Plan

WIRE_ITEMSIZE = 2
"""Matrices travel in bfloat16, in which they are worked on."""
MATRICES = "(matrices)"
"""The label of an exchange of matrices in the operation log."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """(batch, rows, columns) of a parameter that is updated as a matrix.

    Three dims are a batch of matrices (experts); from four dims on (convolutions) all but the first are columns.
    """
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], math.prod(shape[1:])


def with_owners(units: Sequence[UnitPlan], matrices: Sequence[str]) -> list[UnitPlan]:
    """The units with an owner for each of the parameters named in `matrices` that is divided."""
    wanted = set(matrices)
    work: dict[Axes, list[float]] = {}
    jobs: list[tuple[float, int, int, int]] = []
    for number, unit in enumerate(units):
        for index, group in enumerate(unit.groups):
            if not _is_divided(group) or group.layout.segments[0].name not in wanted:
                continue
            work.setdefault(unit.axes_of(group), [0.0] * group.layout.shards)
            for place, segment in enumerate(group.layout.segments):
                batch, rows, columns = matrix_shape(segment.shape)
                jobs.append((float(batch * rows * columns * min(rows, columns)), number, index, place))
    owners = {(number, index): [0] * len(units[number].groups[index].layout.segments) for _, number, index, _ in jobs}
    for cost, number, index, place in sorted(jobs, key=lambda job: (-job[0], job[1:])):
        loads = work[units[number].axes_of(units[number].groups[index])]
        owner = loads.index(min(loads))
        loads[owner] += cost
        owners[number, index][place] = owner
    return [
        replace(
            unit, groups=tuple(_owned_by(group, owners.get((number, index))) for index, group in enumerate(unit.groups))
        )
        for number, unit in enumerate(units)
    ]


def _owned_by(group: GroupPlan, owners: Sequence[int] | None) -> GroupPlan:
    return group if owners is None else replace(group, owners=tuple(owners))


def exchange_nbytes(plan: Plan) -> dict[Axes, int]:
    """Bytes that a rank sends on average in one exchange, by mesh axes: its share of all matrices with an owner."""
    found: dict[Axes, int] = {}
    for axes, group in _owned(plan):
        found[axes] = found.get(axes, 0) + group.layout.parameter_numel * WIRE_ITEMSIZE
    return {axes: -(-nbytes // plan.mesh.size(axes)) for axes, nbytes in found.items()}


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
