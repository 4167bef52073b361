"""Predicts the time of one step by running the engine's operation lists over clocks instead of streams.

    host      issues kernels and operations; slower than the GPU at small batches
    compute   kernels of the segments, collects, norm, update
    gather    all-gathers        reduce    reduce-scatters        copies    PCIe        cpu    updates on the host
    windows   updates of state on disk, which pass windows of host memory
    disk      parameters read for gathers; the time of an update on disk includes these reads

A clock is the time until which a stream is busy. The waits are those of the engine: a unit's use waits for its gather,
a gather for its slot and for the update of its shard, the norm for all reduces. Collectives slow concurrent kernels
down by a share of their own time. Two steps warm up; the third is measured.

Rejected: adding up compute and a share of the communication. How much of it overlaps with compute depends on the order
of units, on their sizes and on the slots, which are in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.groups import UnitPlan
from zeroshard.plan.legs import Leg, LegKind, Route, Stream
from zeroshard.plan.offload import update_disk_nbytes
from zeroshard.plan.placement import StateKind, Tier
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import HostUpdate
from zeroshard.plan.program import OpKind, Program, build_programs
from zeroshard.plan.traffic import new_ledger, stats_numel
from zeroshard.planner.machine.hardware import Cluster
from zeroshard.planner.predict.collectives import collective_seconds, group_of
from zeroshard.planner.predict.cost import copy_seconds, kernel_seconds, norm_seconds, update_nbytes, update_seconds
from zeroshard.planner.trace.exchanges import Exchange
from zeroshard.planner.trace.kernels import Kernel
from zeroshard.planner.trace.model_trace import Phase, Segment, Trace

STREAMS: tuple[str, ...] = ("host", "compute", "gather", "reduce", "copies", "cpu", "windows", "disk")
WARM_UP = 2
STEADY = 2
"""Micro-batches after which each further one takes as long as the one before it."""
BOTH_WAYS = 71 / 54
"""Rate of a PCIe link in both directions at once over its rate in one: 71 and 54 GB/s, measured on an H100."""
CODE_PASSES = {LegKind.ENCODE: 10, LegKind.DIFFER: 10, LegKind.DECODE: 4, LegKind.ADD: 4, LegKind.SUM: 15}
"""How many times the bytes of one kernel torch's operations move, which encode and decode one after the other."""
STEP_LAUNCHES = 40
"""Kernel launches of a step besides one update per unit: norm, coefficient, table of scalars."""


@dataclass(frozen=True)
class Span:
    """Work on a stream, in seconds from the start of the step."""

    stream: str
    label: str
    start: float
    end: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step and where they go.

    Attributes:
        compute: seconds of kernels of forward and backward by kind; 'collect', 'norm', 'update' are the engine's own.
        busy: seconds in which each stream works.
        exposed: seconds in which compute waits for another stream or for the host.
        spans: the work of all streams.
    """

    seconds: float
    compute: dict[str, float]
    busy: dict[str, float]
    exposed: float
    spans: tuple[Span, ...] = field(repr=False)


def step_time(
    plan: Plan,
    traced: Trace,
    cluster: Cluster,
    *,
    micro_batches: int = 1,
    two_levels: bool = False,
) -> StepTime:
    """Simulate a steady step of `micro_batches` forward and backward passes under `plan` on `cluster`.

    Args:
        two_levels: collectives run between the nodes first, then inside each.
    """
    run = _Simulation(plan, traced, cluster, two_levels)
    for _ in range(WARM_UP):
        run.step(micro_batches)
    return run.measured(micro_batches)


def steady_time(plan: Plan, traced: Trace, cluster: Cluster, micro_batches: int) -> StepTime:
    """As `step_time`, but micro-batches after the first few are extrapolated, since each takes as long as the last."""
    if micro_batches <= STEADY + 1 or plan.policy.micro_batches > 1:
        return step_time(plan, traced, cluster, micro_batches=micro_batches)
    few, more = (step_time(plan, traced, cluster, micro_batches=count) for count in (STEADY, STEADY + 1))
    further = micro_batches - STEADY

    def grown(first: float, second: float) -> float:
        return first + further * (second - first)

    kinds = {kind: grown(few.compute.get(kind, 0.0), seconds) for kind, seconds in more.compute.items()}
    busy = {stream: grown(few.busy[stream], seconds) for stream, seconds in more.busy.items()}
    return StepTime(grown(few.seconds, more.seconds), kinds, busy, grown(few.exposed, more.exposed), more.spans)


class _Simulation:
    """Clocks of one rank, and the times of the events that the engine waits for."""

    def __init__(self, plan: Plan, traced: Trace, cluster: Cluster, two_levels: bool) -> None:
        self._plan, self._traced, self._cluster = plan, traced, cluster
        self._two_levels = two_levels
        self._share = cluster.efficiency
        self._programs = build_programs(plan)
        self._ledger = new_ledger(plan)
        self._clock: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
        self._gathered: dict[int, float] = {}
        self._slot_free: dict[int, float] = {}
        self._wire_free: dict[int, float] = {}
        self._written: dict[int, float] = {}
        self._worker_ends: dict[int, float] = {}
        self._read: dict[int, float] = {}
        self._contention = 0.0
        self._spans: list[Span] = []
        self._kinds: dict[str, float] = {}
        self._seconds_of_kernel: dict[Kernel, float] = {}
        self._waited = 0.0

    # A step.

    def measured(self, micro_batches: int) -> StepTime:
        began = self._clock["compute"]
        self._spans, self._kinds, self._waited = [], {}, 0.0
        self.step(micro_batches)
        seconds = self._clock["compute"] - began
        busy = dict.fromkeys(STREAMS, 0.0)
        for span in self._spans:
            busy[span.stream] += span.end - span.start
        spans = tuple(Span(s.stream, s.label, s.start - began, s.end - began) for s in self._spans)
        return StepTime(seconds, dict(self._kinds), busy, self._waited, spans)

    def step(self, micro_batches: int) -> None:
        together = self._plan.policy.micro_batches
        for first in range(0, micro_batches, together):
            left = micro_batches - first
            self._pass(min(together, left), last=left <= together)
        self._optimizer()

    def _pass(self, together: int, *, last: bool) -> None:
        """A forward and backward of so many micro-batches, which pass each unit in turn."""
        forward, backward = _Cursor(self._programs.forward), _Cursor(self._programs.backward)
        complete = iter(self._traced.complete)
        for segment in self._traced.segments:
            cursor = forward if segment.phase is Phase.FORWARD else backward
            if segment.phase is not Phase.FORWARD:
                for unit in next(complete):
                    self._reduce_unit(unit, together, last)
            for _ in range(together):
                if segment.uses:
                    self._run(cursor.to_use(segment.unit))
                self._kernels(segment)
        for unit in range(len(self._plan.units)):
            self._release(unit)

    def _optimizer(self) -> None:
        plan, cluster = self._plan, self._cluster
        self._wait("compute", self._clock["reduce"])
        self._work("norm", "norm", norm_seconds(cluster, plan.units))
        if plan.dp > 1:
            everyone = group_of(cluster, plan.dp)
            self._work("all-reduce", "norm", collective_seconds(cluster, "all-reduce", 8 * stats_numel(plan), everyone))
        self._clock["host"] += (STEP_LAUNCHES + len(plan.units)) * self._share.host_launch
        self._work("step", "norm", self._share.step_latency)
        ready = max(self._clock["compute"], self._clock["copies"])
        for index in dict.fromkeys(plan.order):
            self._update(index, ready)
        self._ledger.invalidate()
        self._run((op.kind, op.unit) for op in self._programs.after_step)
        if not plan.policy.overlap_step:
            for index, unit in enumerate(plan.units):
                if not unit.sharded:
                    self._wait("compute", self._gathered.get(index, 0.0))

    def _update(self, index: int, ready: float) -> None:
        unit = self._plan.units[index]
        if not any(group.updated_off_device for group in unit.groups):
            self._work(f"update {unit.label}", "update", update_seconds(self._cluster, unit))
            self._written[index] = self._clock["compute"]
            return
        self._written[index] = self._host_update(index, ready)

    def _host_update(self, index: int, ready: float) -> float:
        """When the update of a unit with offloaded state ends: by the processor, or streamed through the GPU."""
        unit = self._plan.units[index]
        share, node = self._share, self._cluster.per_node
        own = sum(map(update_nbytes, unit.groups))
        kept = sum(group.nbytes(StateKind.MASTER) + group.nbytes(StateKind.MOMENTS) for group in unit.groups)
        param = sum(group.layout.shard_numel * itemsize(group.param.dtype) for group in unit.groups)
        # Parameters and gradients are counted where they are copied: at the gathers and in the backward.
        pcie = self._cluster.gpu.pcie_rate * share.pcie
        read = sum(group.held_on(Tier.NVME, StateKind.PARAM) for group in unit.groups)  # by the next forward
        disk = (sum(map(sum, map(update_disk_nbytes, unit.groups))) + read) * node / share.disk_rate
        by_cpu = max(own * node / share.host_memory_rate, disk)
        through_windows = any(group.passes_windows for group in unit.groups)
        if HostUpdate.PROCESSOR in (group.update for group in unit.groups):
            worker = "windows" if through_windows else "cpu"
            _, end = self._occupy(worker, f"update {unit.label}", ready, by_cpu)
            self._worker_ends[index] = end
            return self._occupy("copies", f"parameters of {unit.label}", end, param / pcie)[1]
        grads = sum(group.nbytes(StateKind.GRAD) for group in unit.groups if group.grad_off_device)
        streamed = (2 * kept + grads) / (pcie * BOTH_WAYS)
        worker = "windows" if through_windows else "copies"
        _, end = self._occupy(worker, f"stream state of {unit.label}", ready, max(streamed, disk))
        if through_windows:
            self._worker_ends[index] = end
        return end

    # Operations.

    def _run(self, ops: Iterator[tuple[OpKind, int]]) -> None:
        for kind, unit in ops:
            if kind is OpKind.GATHER:
                self._gather(unit)
            elif kind is OpKind.READ and not self._ledger.holds(unit):
                self._begin_read(unit)
            elif kind is OpKind.USE:
                if not self._ledger.holds(unit):
                    self._gather(unit)
                self._wait("compute", self._gathered.get(unit, 0.0))
            elif kind is OpKind.RELEASE:
                self._release(unit)

    def _begin_read(self, index: int) -> None:
        unit = self._plan.units[index]
        if index in self._read or not unit.reads:
            return
        nbytes = sum(leg.nbytes for legs in self._plan.legs[index] for leg in legs.reads)
        ready = max(self._written.get(index, 0.0), self._clock["host"])
        seconds = nbytes * self._cluster.per_node / self._share.disk_rate
        self._read[index] = self._occupy("disk", f"read {unit.label}", ready, seconds)[1]

    def _gather(self, index: int) -> None:
        unit = self._plan.units[index]
        if self._ledger.holds(index):
            return
        self._ledger.take(index)
        # The host copies what a worker has written, so it waits for the worker: at stages 1 and 2 within the step.
        self._clock["host"] = max(self._clock["host"], self._worker_ends.pop(index, 0.0)) + self._share.host_operation
        slot = self._plan.gather_slots.of_unit[index]
        ready = max(self._written.get(index, 0.0), self._clock["host"])
        if slot is not None:
            ready = max(ready, self._slot_free.get(slot, 0.0))
        self._begin_read(index)
        ready = max(ready, self._read.pop(index, 0.0))
        outdated = self._ledger.take_outdated(index)
        for group, legs in zip(unit.groups, self._plan.legs[index], strict=True):
            made_first = legs.renewal(outdated, trainable=group.trainable)
            ready = self._run_beside(unit, "gather", (*made_first, *legs.gather), ready)
        self._gathered[index] = ready

    def _release(self, index: int) -> None:
        slot = self._plan.gather_slots.of_unit[index]
        if slot is not None:
            self._slot_free[slot] = self._clock["compute"]
        self._ledger.release(index)

    def _reduce_unit(self, index: int, together: int, last: bool) -> None:
        """Collect a unit's gradients, those of each micro-batch, and reduce them if the plan does in this backward."""
        unit = self._plan.units[index]
        slot = self._plan.reduce_slots.of_unit[index]
        if slot is not None:
            self._wait("compute", self._wire_free.get(slot, 0.0))
        self._clock["host"] += self._share.host_operation
        for legs in self._plan.legs[index]:
            now = legs.reduce if last or legs.divided else legs.keep
            if together > 1:
                now = (*legs.keep * together, *(legs.pending if last or legs.divided else ()))
            for leg in now:
                if leg.stream is Stream.COMPUTE:
                    self._work(f"{leg.kind.value} {unit.label}", "collect", self._pass_seconds(leg))
            self._run_beside(
                unit, "reduce", [leg for leg in now if leg.stream is not Stream.COMPUTE], self._clock["compute"]
            )
        if slot is not None:
            self._wire_free[slot] = self._clock["reduce"]
        if index:
            self._release(index)

    def _run_beside(self, unit: UnitPlan, stream: str, legs: Sequence[Leg], ready: float) -> float:
        """Run legs beside compute, one after the other; returns when the last one ends."""
        for leg in legs:
            label = f"{leg.kind.value} {unit.label}"
            if leg.kind is LegKind.READ:
                continue  # a separate operation reads
            if leg.axes:
                ready = self._collective(stream, label, leg, ready)
            elif leg.kind is LegKind.COPY:
                seconds = leg.nbytes / (self._cluster.gpu.pcie_rate * self._share.pcie)
                ready = self._occupy("copies", f"copy of {unit.label}", ready, seconds)[1]
            else:
                ready = self._occupy(stream, label, ready, self._pass_seconds(leg))[1]
        return ready

    def _pass_seconds(self, leg: Leg) -> float:
        """Seconds of a leg that sends nothing, a pass over memory. Squares are counted with the norm."""
        if leg.kind is LegKind.SQUARE:
            return 0.0
        return copy_seconds(self._cluster, leg.moved_nbytes) * CODE_PASSES.get(leg.kind, 1)

    # Clocks.

    def _kernels(self, segment: Segment) -> None:
        seconds = 0.0
        for kernel, count in segment.kernels.items():
            if kernel not in self._seconds_of_kernel:
                self._seconds_of_kernel[kernel] = kernel_seconds(self._cluster, kernel)
            spent = self._seconds_of_kernel[kernel] * count
            self._kinds[kernel.kind.value] = self._kinds.get(kernel.kind.value, 0.0) + spent
            seconds += spent
        self._clock["host"] += segment.launches * self._share.host_launch
        slowed = min(self._contention, seconds)
        self._contention -= slowed
        self._kinds["slowed by collectives"] = self._kinds.get("slowed by collectives", 0.0) + slowed
        began = max(self._clock["compute"], self._clock["host"] - segment.launches * self._share.host_launch)
        self._waited += began - self._clock["compute"]
        end = max(began + seconds + slowed, self._clock["host"])
        self._waited += end - (began + seconds + slowed)
        name = f"{segment.phase.value} {self._plan.units[segment.unit].label}"
        self._spans.append(Span("compute", name, began, end))
        self._clock["compute"] = end
        for exchange, count in segment.exchanges.items():
            self._work(f"{exchange.kind} over {exchange.axis}", f"over {exchange.axis}", self._sent(exchange) * count)

    def _sent(self, exchange: Exchange) -> float:
        """Seconds of one of the model's own collectives, which compute waits for."""
        mesh = self._plan.mesh
        ranks = group_of(self._cluster, mesh.size((exchange.axis,)), stride=mesh.stride(exchange.axis))
        return collective_seconds(self._cluster, exchange.kind, exchange.nbytes, ranks)

    def _work(self, label: str, kind: str, seconds: float) -> None:
        self._kinds[kind] = self._kinds.get(kind, 0.0) + seconds
        began = max(self._clock["compute"], self._clock["host"])
        self._waited += began - self._clock["compute"]
        self._clock["compute"] = began + seconds
        if seconds:
            self._spans.append(Span("compute", label, began, began + seconds))

    def _wait(self, stream: str, until: float) -> None:
        late = until - self._clock[stream]
        if late > 0:
            self._waited += late
            self._clock[stream] = until

    def _collective(self, stream: str, label: str, leg: Leg, ready: float) -> float:
        mesh = self._plan.mesh
        ranks = group_of(self._cluster, mesh.size(leg.axes), stride=mesh.stride(leg.axes[-1]))
        seconds = collective_seconds(self._cluster, leg.kind.value, leg.nbytes, ranks, two_levels=self._two_levels)
        copies = leg.route is Route.COPIES
        self._contention += (self._share.peer_contention if copies else self._share.contention) * seconds
        return self._occupy(stream, label, ready, seconds)[1]

    def _occupy(self, stream: str, label: str, ready: float, seconds: float) -> tuple[float, float]:
        start = max(self._clock[stream], ready)
        self._clock[stream] = start + seconds
        if seconds:
            self._spans.append(Span(stream, label, start, start + seconds))
        return start, start + seconds


class _Cursor:
    """Moves along an operation list up to the use of a unit, as the engine's cursor does."""

    def __init__(self, program: Program) -> None:
        self._program, self._at = program, 0

    def to_use(self, unit: int) -> Iterator[tuple[OpKind, int]]:
        """The operations up to and including the next USE of `unit`; only a USE if the list has no more."""
        rest = self._program[self._at :]
        for offset, op in enumerate(rest):
            if op.kind is OpKind.USE and op.unit == unit:
                self._at += offset + 1
                yield from ((op.kind, op.unit) for op in rest[: offset + 1])
                return
        yield OpKind.USE, unit
