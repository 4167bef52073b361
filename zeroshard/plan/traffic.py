"""Traffic of a step, counted by running the plan's programs over a slot ledger, without any tensor.

Payload bytes per rank: an all-gather counts its whole output, a reduce-scatter its whole input, an all-reduce its
tensor, an all-to-all what a rank sends on average (its own part included). A ring moves (n-1)/n of an all-gather's or
reduce-scatter's payload over each link, and twice that of an all-reduce's; so data parallel's all-reduce of the
gradients counts like one reduce-scatter plus one all-gather here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from zeroshard.plan.compression import compressed_nbytes
from zeroshard.plan.legs import Legs
from zeroshard.plan.matrices import exchange_nbytes
from zeroshard.plan.plan import Plan
from zeroshard.plan.program import OpKind, Program, build_programs
from zeroshard.sharding.slots import SlotLedger

STATS_FIXED = 3
"""float64 values exchanged in each step besides one per trainable parameter: squared norm, and two for divergence."""


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
    """Traffic of one steady optimizer step of `micro_batches` forward and backward passes.

    Args:
        no_sync: all but the last micro-batch run under no_sync.
        compressed: a 1-bit optimizer averages in compressed form, not gradients.
        local: it averages nothing in this step.
    """
    programs = build_programs(plan)
    ledger = new_ledger(plan)
    count = _Counter(plan)
    for step in range(2):  # the second one is steady: it starts with what the first left in the slots
        if step:
            count.clear()
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            count.run(programs.forward, ledger, reduce=False, last=last)
            count.run(programs.backward, ledger, reduce=(last or not no_sync) and not (compressed or local), last=last)
        count.add("all-reduce", stats_numel(plan) * 8, plan.dp)
        count.add("all-reduce", sums_numel(plan) * 8, plan.dp)
        for axes, nbytes in exchange_nbytes(plan).items():
            for _ in range(2):  # there as what is to be made orthogonal, back as what has been
                count.add("all-to-all", nbytes, plan.mesh.size(axes))
        if compressed:
            count.add("all-reduce", maxima_numel(plan) * 8, plan.dp)
            count.add("all-to-all", compressed_nbytes(plan), plan.dp)
            count.add("all-gather", compressed_nbytes(plan), plan.dp)
        ledger.invalidate()
        count.run(programs.after_step, ledger, reduce=False, last=True)
    return Traffic(dict(count.calls), dict(count.nbytes))


def new_ledger(plan: Plan) -> SlotLedger:
    """The ledger of a plan's gather slots, all empty."""
    stale = [index for index, unit in enumerate(plan.units) if not unit.sharded and unit.stepped_in_shards]
    return SlotLedger(plan.gather_slots, stale=stale, reuse=plan.policy.reuse)


def stats_numel(plan: Plan) -> int:
    """float64 values in the small all-reduce of each step."""
    return STATS_FIXED + sum(len(group.layout.segments) for _, group in plan.groups() if group.trainable)


def sums_numel(plan: Plan) -> int:
    """float64 values in the all-reduce of what the optimizer sums per parameter; 0 where every rank has the whole."""
    return plan.policy.parameter_sums * _divided_parameters(plan)


def maxima_numel(plan: Plan) -> int:
    """float64 values in the all-reduce of maxima per parameter of a compressed step."""
    return plan.policy.parameter_maxima * _divided_parameters(plan)


def _divided_parameters(plan: Plan) -> int:
    """Trainable parameters of a plan that divides any of them; 0 where every rank updates all of all."""
    trainable = [group for _, group in plan.groups() if group.trainable]
    if not any(group.update_axes and group.layout.shards > 1 for group in trainable):
        return 0
    return sum(len(group.layout.segments) for group in trainable)


class _Counter:
    """Adds up what the operations of a program send."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def clear(self) -> None:
        self.calls.clear()
        self.nbytes.clear()

    def add(self, kind: str, nbytes: int, ranks: int) -> None:
        if ranks > 1 and nbytes:
            self.calls[kind] += 1
            self.nbytes[kind] += nbytes

    def run(self, program: Program, ledger: SlotLedger, *, reduce: bool, last: bool) -> None:
        for op in program:
            if op.kind is OpKind.GATHER and not ledger.holds(op.unit):
                ledger.take(op.unit)
                for legs in self.plan.legs[op.unit]:
                    self._legs(legs.gather)
            elif op.kind is OpKind.RELEASE:
                ledger.release(op.unit)
            elif op.kind is OpKind.REDUCE and reduce:
                for legs in self.plan.legs[op.unit]:
                    if last or legs.divided:
                        self._legs(legs.reduce)

    def _legs(self, legs: Legs) -> None:
        for leg in legs:
            if leg.axes:
                self.add(leg.kind.value, leg.nbytes, self.plan.mesh.size(leg.axes))
