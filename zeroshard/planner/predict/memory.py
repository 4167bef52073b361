"""Adds up the memory of one step, segment by segment: state from the plan, activations from the trace.

    at the peak of each segment    resting state + slots + what the trace holds + gradients reduced so far
                                   + the gradients that are still being copied to peers
    at the optimizer step          resting state + slots + all gradients

The peak of the step is the largest of these sums, not the sum of the largest parts: with checkpointing, gradients grow
while activations shrink, and the peak is at either end. No formula here is for one architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.groups import GroupPlan
from zeroshard.plan.hops import ERROR_DTYPE
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import buffer_host_nbytes, stream_buffer_nbytes, windows_nbytes
from zeroshard.plan.placement import Placement, Residency, StateKind, Tier
from zeroshard.plan.plan import Plan
from zeroshard.planner.trace.allocator import rounding
from zeroshard.planner.trace.ledger import Purpose
from zeroshard.planner.trace.model_trace import Phase, Segment, Trace

KINDS = (
    "parameters",
    "gradients",
    "master weights",
    "moments",
    "slots",
    "workspaces",
    "rounding",
    "activations",
    "logits and loss",
    "backward",
    "local gradients",
    "inputs",
)
"""What device memory is used for. 'workspaces' are cuBLAS's and the tables of the step's kernels; 'rounding' is what
the allocator adds to resting state; 'local gradients' are whole gradients of a unit before they are in a slot or at
peers."""

CUBLAS_WORKSPACE = 2 * 32 * 2**20
"""Bytes on Hopper and newer (a quarter of it before): one for the thread of the forward, one for that of autograd."""
UPDATE_TABLE, NORM_TABLE, SEGMENT_ROW = 12 / 512, 40 / 16384, 64
"""Bytes per updated element, per summed element and per parameter, of the tables that the step's kernels read."""

_OF_PURPOSE = {
    Purpose.INPUTS: "inputs",
    Purpose.ACTIVATIONS: "activations",
    Purpose.LOGITS: "logits and loss",
    Purpose.TEMPORARY: "backward",
    Purpose.GRADIENTS: "local gradients",
}
_OF_MICRO_BATCH = {one: name for one, name in _OF_PURPOSE.items() if one is not Purpose.GRADIENTS}
"""What a micro-batch holds between two units, while others pass them: all but gradients of parameters."""
_OF_STATE = {
    StateKind.PARAM: "parameters",
    StateKind.GRAD: "gradients",
    StateKind.MASTER: "master weights",
    StateKind.MOMENTS: "moments",
}


@dataclass(frozen=True)
class Moment:
    """What is alive at the peak of a segment or of the optimizer step, in bytes by KINDS."""

    label: str
    nbytes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())


@dataclass(frozen=True)
class TierBytes:
    """State that rests in each tier, in bytes of one rank, by kind."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    nvme: Mapping[str, int]


@dataclass(frozen=True)
class StepMemory:
    """Device memory of one rank over a steady step, as torch's allocator counts it (allocated, not reserved).

    Attributes:
        moments: the peaks of all segments, in order, and of the optimizer step.
        tiers: resting state by tier, without slots and without gradients that are freed after the step.
    """

    moments: tuple[Moment, ...]
    tiers: TierBytes

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def step_memory(plan: Plan, traced: Trace, *, gpu: bool = True, waiting: int = 0) -> StepMemory:
    """The memory of one rank under `plan`, whose units must be those of the trace.

    Args:
        gpu: False leaves out what a GPU's allocator and libraries take.
        waiting: bytes of activations of other micro-batches, whose backward comes later in a pipeline.
    """
    found = _on_device(plan, traced, waiting)
    return found if gpu else _without_gpu(found)


def _without_gpu(memory: StepMemory) -> StepMemory:
    apart = ("workspaces", "rounding")
    moments = (
        Moment(moment.label, {name: n for name, n in moment.nbytes.items() if name not in apart})
        for moment in memory.moments
    )
    return StepMemory(tuple(moments), memory.tiers)


def _on_device(plan: Plan, traced: Trace, waiting: int) -> StepMemory:
    tiers = tier_bytes(plan)
    resting = {
        **dict(tiers.device),
        "slots": slots_nbytes(plan),
        "workspaces": workspace_nbytes(plan),
        "rounding": sum(map(rounding, _allocations(plan))),
    }
    reduced: dict[str, int] = {}
    moments: list[Moment] = []
    sending, started = 0, False
    others, before = plan.policy.micro_batches - 1, (0,) * len(Purpose)
    complete = iter(traced.complete)
    for segment in traced.segments:
        if segment.phase is Phase.BACKWARD:
            for unit in next(complete):
                _add(reduced, _reduced_nbytes(plan, unit))
                sending = _sent_nbytes(plan, unit, sending)
        nbytes = {name: segment.peak[purpose] for purpose, name in _OF_PURPOSE.items()}
        nbytes["local gradients"] += sending
        nbytes["activations"] += waiting
        if others:
            _add(nbytes, {name: others * max(before[one], segment.end[one]) for one, name in _OF_MICRO_BATCH.items()})
        before = segment.end
        moments.append(Moment(_label(plan, segment, started), _added(resting, reduced, nbytes)))
        started = started or segment.phase is Phase.BACKWARD
    step = _added(
        resting, *(_reduced_nbytes(plan, unit) for unit in range(len(plan.units))), {"local gradients": sending}
    )
    step["workspaces"] += state_bytes(plan).step
    moments.append(Moment("optimizer step", step))
    return StepMemory(tuple(moments), tiers)


def tier_bytes(plan: Plan) -> TierBytes:
    """Resting state of one rank by tier and kind; gradients that exist between backward and step only are left out."""
    found: dict[Tier, dict[str, int]] = {tier: {} for tier in Tier}
    for _, group in plan.groups():
        for kind, name in _OF_STATE.items():
            placement = group.placement(kind)
            if placement is None or _is_transient(kind, placement):
                continue
            tier = found[placement.tier]
            tier[name] = tier.get(name, 0) + group.nbytes(kind)
        if group.second_nbytes:
            device = found[Tier.DEVICE]
            device["parameters"] = device.get("parameters", 0) + group.second_nbytes
        if group.errors_nbytes:
            device = found[Tier.DEVICE]
            device["gradients"] = device.get("gradients", 0) + group.errors_nbytes
        beside = buffer_host_nbytes(group)
        if beside:
            found[Tier.HOST]["buffers"] = found[Tier.HOST].get("buffers", 0) + beside
    if window := windows_nbytes(plan):
        found[Tier.HOST]["window"] = window
    return TierBytes(found[Tier.DEVICE], found[Tier.HOST], found[Tier.NVME])


def workspace_nbytes(plan: Plan) -> int:
    """Bytes that cuBLAS and the step's kernels keep."""
    tables = 0.0
    for _, group in plan.groups():
        if group.trainable:
            updated = group.layout.shard_numel if group.update_axes else group.layout.numel
            tables += UPDATE_TABLE * updated + NORM_TABLE * group.layout.shard_numel
            tables += SEGMENT_ROW * len(group.layout.segments)
    return CUBLAS_WORKSPACE + int(tables)


def transient_nbytes(plan: Plan, unit: int) -> int:
    """Device bytes that a unit's reduced gradients take from its backward to the step, if they do not rest."""
    return sum(_transient(group) for group in plan.units[unit].groups)


def _transient(group: GroupPlan) -> int:
    grad = group.grad
    if grad is None or grad.tier is not Tier.DEVICE or not _is_transient(StateKind.GRAD, grad):
        return 0
    return group.nbytes(StateKind.GRAD)


def _is_transient(kind: StateKind, placement: Placement) -> bool:
    return kind is StateKind.GRAD and placement.residency is Residency.AROUND_USE


def slots_nbytes(plan: Plan) -> int:
    """Device bytes of the buffers that gathers, reduces and streamed state pass through."""
    passing = sum(stream_buffer_nbytes(plan)) + plan.sum_slots.total_nbytes
    return plan.gather_slots.total_nbytes + plan.reduce_slots.total_nbytes + passing


def _label(plan: Plan, segment: Segment, started: bool) -> str:
    """A segment in words. `started`: the backward has begun before it."""
    unit = plan.units[segment.unit]
    if segment.unit == 0 and segment.phase is Phase.BACKWARD:
        return "end of the backward" if started else "backward of the loss"
    return f"{segment.phase.value} of {unit.label if segment.unit else 'the root'}"


def _allocations(plan: Plan) -> Iterator[int]:
    """Sizes of resting tensors in memory of torch's allocator, without memory that peers reach and host memory."""
    peers = plan.policy.peer_copies
    for _, group in plan.groups():
        for kind in _OF_STATE:
            placement = group.placement(kind)
            if placement is None or placement.tier is not Tier.DEVICE or _is_transient(kind, placement):
                continue
            if kind is not StateKind.PARAM or not (peers and group.is_gathered):
                yield from [group.nbytes(kind) // placement.copies] * placement.copies
        if group.second_nbytes:
            yield group.second_nbytes
        yield from (numel * itemsize(ERROR_DTYPE) for numel in group.error_numels if numel)
    yield from plan.gather_slots.nbytes
    yield from () if peers else plan.reduce_slots.nbytes
    yield from plan.sum_slots.nbytes
    yield from stream_buffer_nbytes(plan)


def _reduced_nbytes(plan: Plan, unit: int) -> dict[str, int]:
    """Bytes that the reduced gradients of a unit take until the step, with what the allocator adds."""
    sizes = [_transient(group) for group in plan.units[unit].groups]
    return {"gradients": sum(sizes), "rounding": sum(map(rounding, sizes))}


def _sent_nbytes(plan: Plan, unit: int, before: int) -> int:
    """Bytes of gradients that stay alive because peers may still be copying them, after a unit has been reduced.

    They are freed when the next group is reduced (`engine/core/peer_reduce.py`).
    """
    sent = [group for group in plan.units[unit].groups if group.needs_reduce_slot and group.wire_nbytes]
    if not plan.policy.peer_copies or not sent:
        return before
    last = sent[-1]
    if last.grad is None or not last.grad.divided:
        return 0  # whole gradients are sent from their resting buffer
    return last.layout.parameter_numel * itemsize(last.shown_dtype)


def _added(*parts: Mapping[str, int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        _add(total, part)
    return total


def _add(total: dict[str, int], part: Mapping[str, int]) -> None:
    for name, nbytes in part.items():
        total[name] = total.get(name, 0) + nbytes
