"""Divides a traced model into pipeline stages, each with its units, plan, trace, memory and time.

    units in the order of the forward     embed | block 0 | block 1 | block 2 | block 3 | head
    parts, as PipelineModule cuts         [embed, block 0]  [block 1, block 2]  [block 3, head]
    a rank                                 one part, or several (chunks), with a plan of their units alone

The trace of a part is cut out of the whole trace; bytes that are alive before it belong to the parts before. The time
of a micro-batch in a stage is the difference between steps of two micro-batches and of one, on the same clocks as every
other row; the schedule then runs over these times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from zeroshard.errors import PlanError
from zeroshard.mesh import Mesh
from zeroshard.pipeline.order import Order, order_of
from zeroshard.pipeline.partition import partition
from zeroshard.pipeline.schedules import Shape
from zeroshard.plan.builder import Recipe, build_plan, reordered
from zeroshard.plan.plan import Plan
from zeroshard.planner.machine.hardware import Cluster
from zeroshard.planner.predict.cost import kernels_seconds
from zeroshard.planner.predict.memory import StepMemory, step_memory
from zeroshard.planner.predict.pipeline_clock import PartTime, PipelineTime, pipeline_time
from zeroshard.planner.predict.timeline import StepTime, step_time
from zeroshard.planner.trace.kernels import Kernel, KernelKind
from zeroshard.planner.trace.model_trace import Phase, Segment, Trace, total_kernels
from zeroshard.sharding.units import UnitSpec


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline: the numbers of its parts of the model, its plan, trace and memory."""

    parts: tuple[int, ...]
    plan: Plan
    traced: Trace
    memory: StepMemory


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline and the times of a step.

    Attributes:
        alone: by stage, the time of a step of one micro-batch without the other stages.
        time: of the micro-batches of a step, through all stages.
        once: seconds of a step besides its micro-batches: the last reduces, norm, update.
    """

    stages: tuple[Stage, ...]
    alone: tuple[StepTime, ...]
    time: PipelineTime
    once: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.time.seconds + self.once


def layers_in_order(units: Sequence[UnitSpec], traced: Trace) -> list[int]:
    """The units besides the root, in the order of the forward."""
    rest = [index for index in range(1, len(units)) if index not in traced.order]
    return [*dict.fromkeys(traced.order), *rest]


def partition_units(units: Sequence[UnitSpec], traced: Trace, parts: int) -> list[list[int]]:
    """The units of each part; parts have about equally many parameters, as those of `PipelineModule`.

    Raises:
        PlanError: there are fewer units than parts.
    """
    order = layers_in_order(units, traced)
    if len(order) < parts:
        raise PlanError(f"{len(order)} layers can't have {parts} parts: each needs at least one; use fewer stages")
    weights = [sum(_numel(p.shape) for p in units[index].parameters) for index in order]
    borders = partition(weights, parts)
    return [order[borders[part] : borders[part + 1]] for part in range(parts)]


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@dataclass(frozen=True)
class Split:
    """A pipeline whose times are not computed yet.

    Attributes:
        order: the actions of each rank.
        cuts: by part, its segments of the trace.
        between: bytes that are sent from part to part.
    """

    order: Order
    cuts: tuple[Trace, ...]
    between: int
    stages: tuple[Stage, ...]

    def timed(self, cluster: Cluster, send_seconds: Callable[[int], float]) -> Pipeline:
        """The pipeline with its times; `send_seconds` gives the seconds to send so many bytes to another stage."""
        known: dict[int, tuple[StepTime, float]] = {}
        times: dict[int, PartTime] = {}
        for stage in self.stages:
            if id(stage.plan) not in known:
                once, twice = (step_time(stage.plan, stage.traced, cluster, micro_batches=n) for n in (1, 2))
                known[id(stage.plan)] = once, max(0.0, twice.seconds - once.seconds)
            micro = known[id(stage.plan)][1]
            times |= _times_of_parts(micro, {part: self.cuts[part] for part in stage.parts}, cluster)
        clocks = pipeline_time(self.order, [times[part] for part in sorted(times)], send_seconds(self.between))
        alone = tuple(known[id(stage.plan)][0] for stage in self.stages)
        once = max(max(0.0, one.seconds - micro) for one, micro in known.values())
        return Pipeline(self.stages, alone, clocks, once)


def split(units: Sequence[UnitSpec], traced: Trace, recipe: Recipe, mesh: Mesh, shape: Shape, schedule: str) -> Split:
    """Divide a model into the stages and chunks of `shape`; equal stages share a plan.

    Args:
        units, traced: of the whole model; each rank of a stage computes its layers so.
        mesh: the mesh of one stage.
    """
    parts = partition_units(units, traced, shape.stages * shape.chunks)
    cuts = tuple(_cut(traced, parts, number) for number in range(len(parts)))
    order = order_of(schedule, shape)
    between = max((traced.outputs.get(part[-1], 0) for part in parts[:-1]), default=0)
    held = pipeline_time(order, [PartTime(1.0, 1.0, 1.0)] * len(parts)).held
    known: dict[object, Stage] = {}
    stages: list[Stage] = []
    for rank in range(shape.stages):
        own = tuple(sorted({action.part for action in order[rank]}))
        waiting = _waiting(held[rank], cuts, between)
        shapes = tuple(tuple(tuple(p.shape for p in units[index].parameters) for index in parts[p]) for p in own)
        key = (shapes, waiting, own[0] == 0, own[-1] == len(parts) - 1)
        if key not in known:
            known[key] = _stage(units, parts, cuts, own, recipe, mesh, waiting)
        stages.append(replace(known[key], parts=own))
    return Split(order, cuts, between, tuple(stages))


def _stage(
    units: Sequence[UnitSpec],
    parts: Sequence[Sequence[int]],
    cuts: Sequence[Trace],
    own: tuple[int, ...],
    recipe: Recipe,
    mesh: Mesh,
    waiting: int,
) -> Stage:
    last = len(parts) - 1
    root = units[0] if last in own or (0 in own and units[0].aliases) else UnitSpec("", ())
    held = [index for part in own for index in parts[part]]
    number = {0: 0, **{index: place + 1 for place, index in enumerate(held)}}
    traced = _joined([cuts[part] for part in own], number)
    plan = build_plan([root, *(units[index] for index in held)], recipe, mesh)
    plan = reordered(plan, (0, *traced.order))
    return Stage(own, plan, traced, step_memory(plan, traced, waiting=waiting))


def _waiting(held: Sequence[tuple[int, int]], cuts: Sequence[Trace], between: int) -> int:
    """Bytes of activations of the micro-batches that a rank holds besides the one that it computes."""
    kept = {part: _retained(cuts[part]) + (between if part else 0) for part, _ in held}
    total = sum(count * kept[part] for part, count in held)
    return total - min((kept[part] for part, count in held if count), default=0)


def _retained(part: Trace) -> int:
    """Bytes that a part's forward leaves for its backward."""
    forwards = [segment for segment in part.segments if segment.phase is Phase.FORWARD]
    return sum(forwards[-1].end) if forwards else 0


def _cut(traced: Trace, parts: Sequence[Sequence[int]], number: int) -> Trace:
    """The segments of a trace that one part runs; operations of the root belong to the part that runs around them."""
    part_of = {unit: part for part, units in enumerate(parts) for unit in units}
    found: list[Segment] = []
    complete: list[tuple[int, ...]] = []
    at, base = 0, tuple(0 for _ in traced.segments[0].end) if traced.segments else ()
    before: tuple[int, ...] | None = None
    ready = iter(traced.complete)
    end = base
    for segment in traced.segments:
        at = part_of.get(segment.unit, at)
        units = next(ready) if segment.phase is Phase.BACKWARD else ()
        mine = tuple(unit for unit in units if part_of.get(unit, len(parts) - 1) == number)
        if at == number:
            before = end if before is None else before
            found.append(replace(segment, peak=_above(segment.peak, before), end=_above(segment.end, before)))
            if segment.phase is Phase.BACKWARD:
                complete.append(mine)
        elif mine:
            complete[-1] += mine  # it is seen to be complete only when the part before has begun
        end = segment.end
    order = tuple(unit for unit in traced.order if unit in parts[number])
    return Trace(tuple(found), order, tuple(complete), traced.notes, traced.tokens, traced.outputs)


def _above(live: Sequence[int], base: Sequence[int]) -> tuple[int, ...]:
    """Bytes that are alive beyond `base`, by Purpose."""
    return tuple(max(0, now - then) for now, then in zip(live, base, strict=True))


def _joined(parts: Sequence[Trace], number: Mapping[int, int]) -> Trace:
    """The forwards of a rank's parts one after the other, then their backwards; units get the rank's own numbers."""
    forwards = [segment for part in parts for segment in part.segments if segment.phase is Phase.FORWARD]
    backwards: list[Segment] = []
    complete: list[tuple[int, ...]] = []
    for part in reversed(parts):
        backwards += [segment for segment in part.segments if segment.phase is Phase.BACKWARD]
        complete += [tuple(number[unit] for unit in units if unit in number) for units in part.complete]
    segments = tuple(replace(one, unit=number.get(one.unit, 0)) for one in (*forwards, *backwards))
    order = tuple(number[unit] for part in parts for unit in part.order)
    return Trace(segments, order, tuple(complete), parts[0].notes, parts[0].tokens)


def _times_of_parts(micro: float, parts: Mapping[int, Trace], cluster: Cluster) -> dict[int, PartTime]:
    """A rank's seconds of a micro-batch, divided over parts and passes in the ratio of their kernels' times."""
    alone = {part: _kernel_time(traced, cluster) for part, traced in parts.items()}
    total = sum(time.total for time in alone.values()) or 1.0
    scale = micro / total
    return {
        part: PartTime(time.forward * scale, time.inputs * scale, time.weights * scale) for part, time in alone.items()
    }


def _kernel_time(traced: Trace, cluster: Cluster) -> PartTime:
    """Seconds of the kernels alone; half of the matrix products of a backward are taken as gradients of weights."""
    forward, backward = (
        total_kernels([segment for segment in traced.segments if segment.phase is phase]) for phase in Phase
    )
    products: dict[Kernel, int] = {k: n for k, n in backward.items() if k.kind is KernelKind.GEMM}
    weights = kernels_seconds(cluster, products) / 2
    return PartTime(kernels_seconds(cluster, forward), kernels_seconds(cluster, backward) - weights, weights)
