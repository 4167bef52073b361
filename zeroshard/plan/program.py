"""The flat lists of operations that a step executes, made once from the plan.

    forward    GATHER 0, GATHER 1, USE 0, RELEASE 0, GATHER 2, USE 1, RELEASE 1, GATHER 3, USE 2, ...
    backward   USE n, GATHER n-1, REDUCE n, RELEASE n, GATHER n-2, USE n-1, REDUCE n-1, RELEASE n-1, ...
    after step GATHER of every unit whose resident parameters are stale, then of the first units of the next forward

If several micro-batches pass a unit before the next one (`policy.micro_batches`, the vertical schedule), it is used so
many times in a row, and gathered, reduced and released once:

    forward    GATHER 0, GATHER 1, USE 0, USE 0, USE 0, RELEASE 0, GATHER 2, USE 1, USE 1, USE 1, RELEASE 1, ...

If parameters rest on disk, each list has the READ of a unit two gathers before its GATHER: READ 0, READ 1, GATHER 0,
READ 2, GATHER 1, READ 3, ...

The engine has a cursor per list and runs it forward to the USE of the module that is being called. Operations in
between (of units that this rank skipped) are issued, too, so every rank issues the same collectives whatever it
computes.

Rejected: issuing gathers from the hook of each module. It is shorter, but a rank that skips a block then makes the
other ranks hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, islice

from zeroshard.plan.offload import READ_WINDOWS
from zeroshard.plan.plan import Plan


class OpKind(str, Enum):
    """The operations on a unit."""

    READ = "read"
    """Begin to read the unit's parameters from disk into host memory, unless the slot holds the unit already."""
    GATHER = "gather"
    """All-gather the unit into its slot, unless the slot holds it already; runs beside compute."""
    USE = "use"
    """Compute waits for the gather; the parameters get their full shape."""
    RELEASE = "release"
    """The parameters become empty; the slot may be overwritten once compute has passed this point."""
    REDUCE = "reduce"
    """The unit's gradients are collected and, on a synchronising backward, reduced beside compute."""


@dataclass(frozen=True)
class Op:
    """One operation on one unit (index into plan.units)."""

    kind: OpKind
    unit: int


Program = tuple[Op, ...]


@dataclass(frozen=True)
class Programs:
    """The operation lists of a plan."""

    forward: Program
    backward: Program
    after_step: Program


def build_programs(plan: Plan) -> Programs:
    """The operation lists of `plan`."""
    forward = _with_reads(plan, _pass(plan, plan.order, reduce=False))
    backward = _with_reads(plan, _pass(plan, tuple(reversed(plan.order)), reduce=True))
    stale = [
        unit for unit in _unique(plan.order) if not plan.units[unit].sharded and plan.units[unit].stepped_in_shards
    ]
    ahead = _first_gathers(forward, limit=plan.policy.prefetch + 1, skip=set(stale))
    after_step = tuple(Op(OpKind.GATHER, unit) for unit in (*stale, *ahead))
    return Programs(forward, backward, _with_reads(plan, after_step))


def _with_reads(plan: Plan, ops: Program) -> Program:
    """The list with each READ as far ahead of its GATHER as there are windows to read into."""
    read = [unit.reads for unit in plan.units]
    gathers = [op.unit for op in ops if op.kind is OpKind.GATHER and read[op.unit]]
    if not gathers:
        return ops
    ahead = READ_WINDOWS - 1
    found = [Op(OpKind.READ, unit) for unit in gathers[:ahead]]
    following = iter(gathers[ahead:])
    for op in ops:
        found.append(op)
        if op.kind is OpKind.GATHER and read[op.unit]:
            found += [Op(OpKind.READ, unit) for unit in islice(following, 1)]
    return tuple(found)


def _unique(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(order))


def _first_gathers(forward: Program, *, limit: int, skip: set[int]) -> list[int]:
    """Units gathered before the first one is used, at most `limit` of the blocks, the root besides."""
    first: list[int] = []
    for op in forward:
        if op.kind is OpKind.USE and len(first) >= limit:
            break
        if op.kind is OpKind.GATHER and op.unit not in skip:
            first.append(op.unit)
        if op.kind is OpKind.RELEASE:
            break
    return first


def _pass(plan: Plan, order: Sequence[int], *, reduce: bool) -> Program:
    """One pass over the units: gathers as early as slots and prefetch distance allow, each use, each release."""
    slots, units = plan.gather_slots.of_unit, plan.units
    root = [index for index, unit in enumerate(units) if unit.name == ""] + sorted(plan.kept)
    runs = groupby(unit for unit in order if unit not in root)
    calls = [(unit, len(list(group)) * plan.policy.micro_batches) for unit, group in runs]
    body = [unit for unit, _ in calls]
    last_use = {unit: index for index, unit in enumerate(body)}
    live: set[int] = set()
    # The use of the root comes last: a pass begins by running to it.
    ops = [Op(OpKind.GATHER, unit) for unit in root] + [Op(OpKind.USE, unit) for unit in reversed(root)]
    issued = 0
    for index, (unit, times) in enumerate(calls):
        while issued < len(body) and issued <= index + plan.policy.prefetch:
            ahead = body[issued]
            slot = slots[ahead]
            if slot in live:
                # The slot is in use until its unit is released. This also holds for a unit that is called again: its
                # release may empty the slot, so an earlier gather would be lost.
                break
            if slot is not None:
                live.add(slot)
            ops.append(Op(OpKind.GATHER, ahead))
            issued += 1
        ops += [Op(OpKind.USE, unit)] * times  # called several times in a row: not released in between
        if reduce and last_use[unit] == index:
            ops.append(Op(OpKind.REDUCE, unit))
        ops.append(Op(OpKind.RELEASE, unit))
        slot = slots[unit]
        if slot is not None:
            live.discard(slot)
    if reduce:
        ops += [Op(kind, unit) for unit in root for kind in (OpKind.REDUCE, OpKind.RELEASE)]
    return tuple(ops)
