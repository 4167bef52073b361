"""Counts the traffic of a step by running the plan's programs over a slot ledger, without any tensor.

Payload bytes per rank: an all-gather counts its whole output, a reduce-scatter its whole input, an all-reduce its
tensor, an all-to-all what a rank sends on average (its own part included). A ring moves (n-1)/n of an all-gather's or
reduce-scatter's payload over each link, and twice that of an all-reduce's; so data parallel's all-reduce of the
gradients counts like one reduce-scatter plus one all-gather here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from zeroshard.mesh import Axes
from zeroshard.plan.compression import compressed_nbytes
from zeroshard.plan.factors import FACTORS, factor_nbytes
from zeroshard.plan.legs import LegKind, Legs
from zeroshard.plan.matrices import MATRICES, exchange_nbytes
from zeroshard.plan.offload import update_disk_nbytes
from zeroshard.plan.plan import Plan
from zeroshard.plan.program import OpKind, Program, build_programs
from zeroshard.sharding.slots import SlotLedger

STATS_FIXED = 3
"""float64 values exchanged in each step besides one per trainable parameter: squared norm, and two for divergence."""


Kind = tuple[str, Axes]
"""A kind of collective, and those of its axes that have more than one rank."""


@dataclass(frozen=True)
class Traffic:
    """Calls and payload bytes by kind of collective, for one rank and one optimizer step."""

    calls: dict[str, int]
    nbytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())


def step_traffic(
    plan: Plan, *, micro_batches: int = 1, no_sync: bool = False, compressed: bool = False, local: bool = False
) -> Traffic:
    """Traffic of one steady optimizer step of `micro_batches`, each a forward and backward pass, or several together.

    Args:
        no_sync: all but the last micro-batch run under no_sync.
        compressed: a 1-bit optimizer averages in compressed form, not gradients.
        local: the optimizer averages nothing in this step.
    """
    count = _counted(plan, micro_batches, no_sync=no_sync, compressed=compressed, local=local)
    calls: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for (kind, _), (number, sent) in count.found.items():
        calls[kind] += number
        nbytes[kind] += sent
    return Traffic(dict(calls), dict(nbytes))


def traffic_by_axes(plan: Plan, *, micro_batches: int = 1) -> dict[Kind, tuple[int, int]]:
    """Calls and payload bytes of one steady optimizer step, by kind and axes."""
    return dict(_counted(plan, micro_batches).found)


@dataclass(frozen=True)
class DiskTraffic:
    """Bytes between one rank and its disks in a step.

    Attributes:
        gathered: parameters that are read for gathers.
        read, written: parameters and optimizer state that an update reads, and writes.
    """

    gathered: int
    read: int
    written: int

    @property
    def total(self) -> int:
        return self.gathered + self.read + self.written


def disk_traffic(plan: Plan, *, micro_batches: int = 1) -> DiskTraffic:
    """The bytes that one steady optimizer step of `micro_batches` moves to and from disk."""
    updates = [update_disk_nbytes(group) for _, group in plan.groups()]
    gathered = _counted(plan, micro_batches).gathered
    return DiskTraffic(gathered, sum(read for read, _ in updates), sum(written for _, written in updates))


def axes_of_operations(plan: Plan) -> dict[tuple[str, str, int], Axes]:
    """The axes of each operation, by its log entry (kind, label, bytes); operations not listed run over all axes."""
    found: dict[tuple[str, str, int], Axes] = {
        ("all-to-all", MATRICES, nbytes): several(plan, axes)
        for axes, parts in exchange_nbytes(plan).items()
        for nbytes in parts
    }
    for axes, sums in factor_nbytes(plan).items():
        found.update({("all-reduce", FACTORS, nbytes): several(plan, axes) for part in sums for nbytes in part})
    for unit, legs_of_unit in zip(plan.units, plan.legs, strict=True):
        for legs in legs_of_unit:
            for leg in (*legs.gather, *legs.refresh, *legs.by_differences, *legs.pending, *legs.reduce, *legs.late):
                if leg.axes:
                    found.setdefault((leg.kind.value, unit.label, leg.nbytes), several(plan, leg.axes))
    return found


def several(plan: Plan, axes: Axes) -> Axes:
    """Those of the axes along which there is more than one rank."""
    return tuple(axis for axis in axes if plan.mesh.size((axis,)) > 1)


def _counted(
    plan: Plan, micro_batches: int, *, no_sync: bool = False, compressed: bool = False, local: bool = False
) -> _Counter:
    programs = build_programs(plan)
    ledger = new_ledger(plan)
    count = _Counter(plan)
    passes = -(-micro_batches // plan.policy.micro_batches)
    everyone = plan.mesh.names
    for step in range(2):  # the second one is steady: it starts with what the first left in the slots
        if step:
            count.clear()
        for number in range(passes):
            last = number == passes - 1
            count.run(programs.forward, ledger, reduce=False, last=last)
            count.run(programs.backward, ledger, reduce=(last or not no_sync) and not (compressed or local), last=last)
        count.add("all-reduce", stats_numel(plan) * 8, everyone)
        count.add("all-reduce", sums_numel(plan) * 8, everyone)
        count.add("all-reduce", scales_numel(plan) * 4, everyone)
        for axes, parts in exchange_nbytes(plan).items():
            for nbytes in (*parts, *parts):  # the pieces to the owners, and the results back
                count.add("all-to-all", nbytes, axes)
        for axes, sums in factor_nbytes(plan).items():
            for nbytes in itertools.chain.from_iterable(sums):
                count.add("all-reduce", nbytes, axes)
        if compressed:
            count.add("all-reduce", maxima_numel(plan) * 8, everyone)
            count.add("all-to-all", compressed_nbytes(plan), everyone)
            count.add("all-gather", compressed_nbytes(plan), everyone)
        ledger.invalidate()
        count.run(programs.after_step, ledger, reduce=False, last=True)
    return count


def new_ledger(plan: Plan) -> SlotLedger:
    """The ledger of a plan's gather slots, all empty."""
    stale = [index for index, unit in enumerate(plan.units) if not unit.sharded and unit.stepped_in_shards]
    second = [index for index, legs in enumerate(plan.legs) if any(group.refresh for group in legs)]
    return SlotLedger(plan.gather_slots, stale=stale, reuse=plan.policy.reuse, second=second)


def stats_numel(plan: Plan) -> int:
    """float64 values in the small all-reduce of each step."""
    return STATS_FIXED + sum(len(group.layout.segments) for _, group in plan.groups() if group.trainable)


def sums_numel(plan: Plan) -> int:
    """float64 values in the all-reduce of the optimizer's sums per parameter; 0 if every rank has the whole."""
    return plan.policy.parameter_sums * _divided_parameters(plan)


def scales_numel(plan: Plan) -> int:
    """float32 values, the largest magnitudes that scales of parameters in fp8 belong to, compared after each step."""
    return sum(sum(group.scale_counts) for _, group in plan.groups())


def maxima_numel(plan: Plan) -> int:
    """float64 values in the all-reduce of maxima per parameter of a compressed step."""
    return plan.policy.parameter_maxima * _divided_parameters(plan)


def _divided_parameters(plan: Plan) -> int:
    """The number of trainable parameters; 0 if every rank updates all of them."""
    trainable = [group for _, group in plan.groups() if group.trainable]
    if not any(group.updated_in_parts for group in trainable):
        return 0
    return sum(len(group.layout.segments) for group in trainable)


class _Counter:
    """Adds up what the operations of a program send."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.found: dict[Kind, tuple[int, int]] = {}
        self.gathered = 0
        """Bytes that gathers read from disk."""
        self._several: dict[Axes, Axes] = {}

    def clear(self) -> None:
        self.found.clear()
        self.gathered = 0

    def add(self, kind: str, nbytes: int, axes: Axes) -> None:
        over = self._several.get(axes)
        if over is None:
            over = self._several[axes] = several(self.plan, axes)
        if over and nbytes:
            calls, before = self.found.get((kind, over), (0, 0))
            self.found[kind, over] = calls + 1, before + nbytes

    def run(self, program: Program, ledger: SlotLedger, *, reduce: bool, last: bool) -> None:
        for op in program:
            if op.kind is OpKind.GATHER and not ledger.holds(op.unit):
                ledger.take(op.unit)
                outdated = ledger.take_outdated(op.unit)
                for group, legs in zip(self.plan.units[op.unit].groups, self.plan.legs[op.unit], strict=True):
                    self._legs(legs.renewal(outdated, trainable=group.trainable))
                    self._legs(legs.gather)
            elif op.kind is OpKind.RELEASE:
                ledger.release(op.unit)
            elif op.kind is OpKind.REDUCE and reduce:
                for legs in self.plan.legs[op.unit]:
                    if last or legs.divided:
                        self._legs(legs.reduce)

    def _legs(self, legs: Legs) -> None:
        for leg in legs:
            if leg.kind is LegKind.READ:
                self.gathered += leg.nbytes
            if leg.axes:
                self.add(leg.kind.value, leg.nbytes, leg.axes)
