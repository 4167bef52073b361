"""The memory of one step: state from the plan, activations from the trace, put together moment by moment.

    at each segment's worst moment    resting state + slots + what the trace holds + sharded gradients landed so far
    at the optimizer step             resting state + slots + all gradients

The peak is the largest of these sums, not the sum of the largest parts: with checkpointing gradients grow while
activations shrink, and the peak is at either end. Nothing here is a formula for an architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import buffer_host_nbytes, stream_buffer_nbytes
from zeroshard.plan.placement import Placement, Residency, StateKind, Tier
from zeroshard.plan.plan import GroupPlan, Plan
from zeroshard.planner.ledger import Purpose
from zeroshard.planner.trace import Phase, Segment, Trace

KINDS = (
    "parameters",
    "gradients",
    "master weights",
    "moments",
    "slots",
    "workspaces",
    "activations",
    "logits and loss",
    "backward",
    "local gradients",
    "inputs",
)
"""What device memory goes to. 'workspaces' are cuBLAS's and the tables of the step's kernels; 'local gradients' are
whole gradients of a unit on their way to a slot."""

CUBLAS_WORKSPACE = 32 * 2**20
"""Bytes on Hopper and newer (a quarter of it before)."""
UPDATE_TABLE, NORM_TABLE, SEGMENT_ROW = 12 / 512, 40 / 16384, 64
"""Bytes per updated element, per summed element and per parameter, of the tables that the step's kernels walk by."""

_OF_PURPOSE = {
    Purpose.INPUTS: "inputs",
    Purpose.ACTIVATIONS: "activations",
    Purpose.LOGITS: "logits and loss",
    Purpose.TEMPORARY: "backward",
    Purpose.GRADIENTS: "local gradients",
}
_OF_STATE = {
    StateKind.PARAM: "parameters",
    StateKind.GRAD: "gradients",
    StateKind.MASTER: "master weights",
    StateKind.MOMENTS: "moments",
}


@dataclass(frozen=True)
class Moment:
    """What is alive at the worst moment of a stretch of the step, in bytes by KINDS."""

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
        moments: the step, stretch by stretch.
        tiers: resting state by tier, slots and gradients that are there for a while not included.
    """

    moments: tuple[Moment, ...]
    tiers: TierBytes

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def step_memory(plan: Plan, traced: Trace) -> StepMemory:
    """The memory of one rank under `plan`, which must be made of the units that were traced."""
    tiers = tier_bytes(plan)
    resting = {**dict(tiers.device), "slots": slots_nbytes(plan), "workspaces": workspace_nbytes(plan)}
    landed, started = 0, False
    moments: list[Moment] = []
    complete = iter(traced.complete)
    for segment in traced.segments:
        if segment.phase is Phase.BACKWARD:
            landed += sum(transient_nbytes(plan, unit) for unit in next(complete))
        moments.append(_moment(_label(plan, segment, started), resting, segment, landed))
        started = started or segment.phase is Phase.BACKWARD
    everything = sum(transient_nbytes(plan, unit) for unit in range(len(plan.units)))
    step = dict(resting)
    step["gradients"] = step.get("gradients", 0) + everything
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
        beside = buffer_host_nbytes(group, plan.policy)
        if beside:
            found[Tier.HOST]["buffers"] = found[Tier.HOST].get("buffers", 0) + beside
    return TierBytes(found[Tier.DEVICE], found[Tier.HOST], found[Tier.NVME])


def workspace_nbytes(plan: Plan) -> int:
    """Bytes that cuBLAS and the step's kernels keep."""
    tables = 0.0
    for _, group in plan.groups():
        if group.trainable:
            updated = group.layout.shard_numel if group.update_axis is not None else group.layout.numel
            tables += UPDATE_TABLE * updated + NORM_TABLE * group.layout.shard_numel
            tables += SEGMENT_ROW * len(group.layout.segments)
    return CUBLAS_WORKSPACE + int(tables)


def transient_nbytes(plan: Plan, unit: int) -> int:
    """Device bytes that a unit's reduced gradients take from its backward to the step."""
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
    passing = sum(stream_buffer_nbytes(plan))
    return plan.gather_slots.total_nbytes + plan.reduce_slots.total_nbytes + passing


def _label(plan: Plan, segment: Segment, started: bool) -> str:
    """A stretch in words. `started`: the backward has begun before it."""
    unit = plan.units[segment.unit]
    if segment.unit == 0 and segment.phase is Phase.BACKWARD:
        return "end of the backward" if started else "backward of the loss"
    return f"{segment.phase.value} of {unit.label if segment.unit else 'the root'}"


def _moment(label: str, resting: Mapping[str, int], segment: Segment, landed: int) -> Moment:
    nbytes = dict(resting)
    nbytes["gradients"] = nbytes.get("gradients", 0) + landed
    for purpose, name in _OF_PURPOSE.items():
        nbytes[name] = segment.peak[purpose]
    return Moment(label, nbytes)
