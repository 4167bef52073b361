"""The plan: a frozen value that says where every byte of training state lives and how a step runs.

    Plan
     +- units[i]: UnitPlan            what is gathered and reduced together, and the mesh axis it is laid out over
     |   +- groups[j]: GroupPlan      one flat buffer per (dtype, trainable): layout and placement of each state kind
     +- order                         units as forward uses them
     +- policy: ExecutionPolicy       prefetch, slots, accumulation, gradient scaling
     +- gather_slots, reduce_slots    which buffer each unit uses, and how large the buffers are

The planner, the memory table, the traffic count and the engine read the same object, so what is printed is what runs.
It is printable, comparable and JSON round-trips. Rejected: letting the engine decide at run time from flags; bugs
between stages come from there, and nothing could be known before a GPU is rented.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.plan.decode import decode
from zeroshard.plan.dtypes import dtype_name, itemsize
from zeroshard.plan.placement import Placement, Residency, StateKind, Tier
from zeroshard.sharding.layout import FlatLayout
from zeroshard.sharding.slots import SlotPlan


class OnNonFinite(str, Enum):
    """What a step does when the gradients hold an inf or NaN."""

    RAISE = "raise"
    SKIP = "skip"
    APPLY = "apply"
    """The update is made from them, unclipped: there is no norm to clip to. Without a loss scale only."""


class HostUpdate(str, Enum):
    """How optimizer state that rests in host memory is updated."""

    PROCESSOR = "processor"
    """By the processor, beside the next forward: gradients go down, parameters in compute dtype come up."""
    STREAMED = "streamed"
    """By the device: state comes up piece by piece, is updated by the device's kernel, and goes down again."""


@dataclass(frozen=True)
class ExecutionPolicy:
    """How a step runs.

    Attributes:
        prefetch: how many units are gathered ahead of the one in use.
        reuse: keep the content of released slots while it is valid; False gathers before every use.
        spare_nbytes: device memory beyond the smallest slots that is spent to keep units gathered from forward to
            backward, last first; with enough of it each unit is gathered once per micro-batch, as at stage 2.
        accumulate: several backwards per step are allowed, and gradients have an accumulator.
        overlap_step: parameters that rest whole are gathered after a step beside the next forward, and who reads them
            before that must drain first; False lets the step wait for them. Sharded units are always gathered ahead.
        predivide: gradients are divided by this before they are summed over ranks.
        mean: gradients are averaged over data-parallel ranks (else summed).
        clip_norm: global gradient norm above which gradients are scaled down; 0 means no clipping.
        on_nonfinite: what to do about inf and NaN in the gradients.
        cast_inputs: floating inputs of the model are cast to this dtype; None leaves them.
        peer_copies: all-gathers and reduce-scatters are copies between memory that all ranks of an axis reach.
        parameter_sums: float64 values per trainable parameter that the optimizer sums over ranks in each step, in one
            all-reduce for all of them (Lamb: two squared norms).
        parameter_maxima: float64 values per trainable parameter of which a compressed step takes the largest over
            ranks, in one all-reduce (1-bit Lamb).
        host_update: how state in host memory is updated; None where there is none.
        stream_numel: elements of each of the device buffers through which streamed state passes.
        pin_memory: host memory that is copied to and from the device is locked.
    """

    prefetch: int = 1
    reuse: bool = True
    spare_nbytes: int = 0
    accumulate: bool = False
    overlap_step: bool = False
    predivide: float = 1.0
    mean: bool = True
    clip_norm: float = 0.0
    on_nonfinite: OnNonFinite = OnNonFinite.RAISE
    cast_inputs: str | None = None
    peer_copies: bool = False
    parameter_sums: int = 0
    parameter_maxima: int = 0
    host_update: HostUpdate | None = None
    stream_numel: int = 0
    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not self.clip_norm >= 0:
            raise PlanError(f"clip_norm {self.clip_norm} must be a number above 0, or 0 for no clipping")
        if self.spare_nbytes < 0 or (self.spare_nbytes and not self.reuse):
            raise PlanError(f"spare_nbytes {self.spare_nbytes} must be 0 or more, and needs reuse of what is in slots")
        if not 0 < self.predivide < math.inf:
            raise PlanError(f"predivide {self.predivide} must be a finite number above 0")


@dataclass(frozen=True)
class GroupPlan:
    """One flat buffer of a unit and the placement of each kind of its state.

    Attributes:
        wire: dtype in which gradients travel; "" for frozen groups.
        staged: the reduced part lands beside the slot first (to be added or converted), not in the gradient itself.
        update_axis: the axis over which the optimizer step is divided; None where every rank updates everything.
        grad, master, moments: None where the group has no such state (frozen; or the parameters are their own master).
        compressed: an optimizer averages momentum in compressed form (1-bit): beside `moments`, of which the update
            reads its part, each rank keeps the whole momentum, the whole of what its own compression left out, and its
            part of what the second one did.
        owners: for parameters that are updated as whole matrices although divided (Muon): the rank along the axis that
            makes each one's update; () for all others.
    """

    layout: FlatLayout
    trainable: bool
    param: Placement
    wire: str = ""
    staged: bool = False
    update_axis: str | None = None
    grad: Placement | None = None
    master: Placement | None = None
    moments: Placement | None = None
    owners: tuple[int, ...] = ()
    compressed: bool = False

    def placement(self, kind: StateKind) -> Placement | None:
        return {
            StateKind.PARAM: self.param,
            StateKind.GRAD: self.grad,
            StateKind.MASTER: self.master,
            StateKind.MOMENTS: self.moments,
            StateKind.ACTIVATION: None,
        }[kind]

    def numel_per_rank(self, placement: Placement) -> int:
        return self.layout.shard_numel if placement.axis is not None else self.layout.numel

    def nbytes(self, kind: StateKind) -> int:
        """Bytes that one rank holds of this kind of state, padding included."""
        placement = self.placement(kind)
        if placement is None:
            return 0
        found = placement.nbytes(self.numel_per_rank(placement))
        if self.compressed and kind is StateKind.MOMENTS:
            found += (2 * self.layout.numel + self.layout.shard_numel) * itemsize(placement.dtype)
        return found

    def held_on(self, tier: Tier, kind: StateKind) -> int:
        """Bytes of this kind of state that one rank holds in a tier."""
        placement = self.placement(kind)
        return self.nbytes(kind) if placement is not None and placement.tier is tier else 0

    @property
    def state_on_host(self) -> bool:
        """Whether the optimizer's state rests off the device; where it has none, whether the parameters do."""
        held = (self.master, self.moments) if self.master is not None or self.moments is not None else (self.param,)
        return self.trainable and any(one is not None and one.tier is not Tier.DEVICE for one in held)

    @property
    def param_on_host(self) -> bool:
        return self.param.tier is Tier.HOST

    @property
    def grad_on_host(self) -> bool:
        return self.grad is not None and self.grad.tier is Tier.HOST

    @property
    def travels(self) -> bool:
        """Whether a gather moves anything for this group: frozen or wholly updated resident groups are current."""
        if self.param_on_host:
            return True
        return self.layout.shards > 1 and (self.param.axis is not None or self.update_axis is not None)

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the whole group in compute dtype."""
        return self.layout.numel * itemsize(self.param.dtype)

    @property
    def needs_reduce_slot(self) -> bool:
        """Whether gradients pass through a slot on their way to the wire, instead of being reduced where they rest."""
        return self.grad is not None and (self.grad.axis is not None or self.grad.dtype != self.wire)

    @property
    def wire_nbytes(self) -> int:
        """Bytes of the whole group's gradients on the wire."""
        return self.layout.numel * itemsize(self.wire) if self.trainable else 0

    @property
    def staging_nbytes(self) -> int:
        """Bytes of this rank's reduced part where it lands beside the slot."""
        return self.layout.shard_numel * itemsize(self.wire) if self.staged else 0


@dataclass(frozen=True)
class UnitPlan:
    """What is gathered and reduced together. The root unit's name is ""."""

    name: str
    axis: str
    groups: tuple[GroupPlan, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        return self.name or "(root)"

    @property
    def sharded(self) -> bool:
        """Whether the parameters rest divided, so that the unit is gathered around its use."""
        return any(group.param.axis is not None for group in self.groups)

    @property
    def trainable(self) -> bool:
        return any(group.trainable for group in self.groups)

    @property
    def stepped_in_shards(self) -> bool:
        """Whether each rank updates only its part, so that whole parameters are stale after a step."""
        return any(group.trainable and group.update_axis is not None for group in self.groups)

    @property
    def gathered_nbytes(self) -> int:
        return sum(group.gathered_nbytes for group in self.groups)

    @property
    def reduce_slot_nbytes(self) -> int:
        """Bytes of the slot that its gradients need: the whole on the wire, then this rank's reduced part."""
        return sum(group.wire_nbytes + group.staging_nbytes for group in self.groups if group.needs_reduce_slot)


@dataclass(frozen=True)
class Plan:
    """Where every byte of training state lives, and how a step runs. See the module's picture."""

    dp: int
    shard: int
    units: tuple[UnitPlan, ...]
    order: tuple[int, ...]
    policy: ExecutionPolicy
    gather_slots: SlotPlan
    reduce_slots: SlotPlan
    kept: tuple[int, ...] = ()
    """Units besides the root that are gathered for a whole pass: other modules than their own read their parameters."""

    def axis_size(self, axis: str) -> int:
        """Ranks along a mesh axis."""
        return {"dp": self.dp, "shard": self.shard, "replicate": self.dp // self.shard}[axis]

    def groups(self) -> Iterator[tuple[UnitPlan, GroupPlan]]:
        for unit in self.units:
            for group in unit.groups:
                yield unit, group

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of tied parameters, and the name that each has in the plan."""
        return {alias: name for unit in self.units for alias, name in unit.aliases}

    @property
    def parameter_numel(self) -> int:
        return sum(group.layout.parameter_numel for _, group in self.groups())

    def to_json(self) -> str:
        """The plan as JSON; `Plan.from_json` gives an equal plan back."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Raises PlanError where the text is not a plan."""
        try:
            plan = decode(Plan, json.loads(text))
            _check(plan)
        except (PlanError, ValueError, OverflowError, RecursionError) as error:
            raise PlanError(f"not a zeroshard plan: {error}") from error
        return plan

    def with_policy(self, **changes: Any) -> Plan:
        """The plan with some fields of its policy replaced; for fields that don't change slots or placements."""
        return replace(self, policy=replace(self.policy, **changes))


def _check(plan: Plan) -> None:
    """Raises PlanError where the parts of a plan don't fit each other, as they may in one that was edited by hand."""
    if plan.dp < 1 or plan.shard < 1 or plan.dp % plan.shard:
        raise PlanError(f"shard {plan.shard} does not divide dp {plan.dp}")
    names = [unit.name for unit in plan.units]
    if names.count("") != 1 or len(set(names)) != len(names):
        raise PlanError('units: each needs a name of its own, and one of them must be the root, ""')
    for unit in plan.order:
        if not 0 <= unit < len(plan.units):
            raise PlanError(f"order names unit {unit}, but there are {len(plan.units)} units")
    for unit in plan.kept:
        if not (0 <= unit < len(plan.units) and plan.units[unit].name):
            raise PlanError(f"kept names unit {unit}, which is not a unit besides the root")
    if plan.policy.prefetch < 0:
        raise PlanError(f"policy.prefetch must not be negative, is {plan.policy.prefetch}")
    if plan.policy.peer_copies and (problem := peer_problem(plan)) is not None:
        raise PlanError(f"policy.peer_copies: {problem}")
    if plan.policy.cast_inputs is not None:
        _check_dtype(plan.policy.cast_inputs, "policy.cast_inputs")
    for index, unit in enumerate(plan.units):
        _check_unit(plan, unit, f"units[{index}]")
    gathered = [unit.gathered_nbytes if unit.sharded else None for unit in plan.units]
    _check_slots(plan.gather_slots, gathered, plan.order, "gather_slots")
    reduced = [unit.reduce_slot_nbytes or None for unit in plan.units]
    _check_slots(plan.reduce_slots, reduced, plan.order, "reduce_slots")


def _check_unit(plan: Plan, unit: UnitPlan, path: str) -> None:
    if unit.axis not in ("dp", "shard"):
        raise PlanError(f"{path}.axis must be 'dp' or 'shard', not {unit.axis!r}")
    for number, group in enumerate(unit.groups):
        where = f"{path}.groups[{number}]"
        _check_layout(group.layout, plan.axis_size(unit.axis), f"{where}.layout")
        if group.update_axis not in (None, unit.axis):
            raise PlanError(f"{where}.update_axis must be null or the unit's axis {unit.axis!r}")
        divided = any(placed is not None and placed.axis is not None for placed in (group.param, group.grad))
        if group.trainable and divided and group.update_axis is None:
            raise PlanError(f"{where}.update_axis must be {unit.axis!r} where parameters or gradients are divided")
        for kind in (StateKind.PARAM, StateKind.GRAD, StateKind.MASTER, StateKind.MOMENTS):
            placement = group.placement(kind)
            if placement is None:
                continue
            _check_dtype(placement.dtype, f"{where}.{kind.value}.dtype")
            if placement.axis not in (None, unit.axis):
                raise PlanError(f"{where}.{kind.value}.axis must be null or the unit's axis {unit.axis!r}")
            if placement.copies < 1:
                raise PlanError(f"{where}.{kind.value}.copies must be 1 or more, is {placement.copies}")
            _check_blocks(group.layout, kind, placement, f"{where}.{kind.value}")
        _check_tiers(plan.policy, group, where)
        if group.trainable:
            _check_dtype(group.wire, f"{where}.wire")
        if group.owners and len(group.owners) != len(group.layout.segments):
            raise PlanError(f"{where}.owners has {len(group.owners)} entries for {len(group.layout.segments)} segments")
        if any(not 0 <= owner < group.layout.shards for owner in group.owners):
            raise PlanError(f"{where}.owners names a rank that the axis {unit.axis!r} does not have")
        if group.trainable != (group.grad is not None):
            raise PlanError(f"{where}.grad must be there for a trainable group, and only for one")


def _check_blocks(layout: FlatLayout, kind: StateKind, placement: Placement, path: str) -> None:
    """Blocks are for moments, and no block may straddle parameters or ranks."""
    if placement.blocks is None:
        return
    size = placement.blocks.size
    if kind is not StateKind.MOMENTS or placement.tier is not Tier.DEVICE:
        raise PlanError(f"{path}.blocks: only moments on the device are kept in blocks")
    borders = [layout.shard_numel, *(border for segment in layout.segments for border in (segment.offset, segment.end))]
    if any(border % size for border in borders):
        raise PlanError(f"{path}.blocks.size {size} does not divide where parameters and shards begin and end")


def _check_layout(layout: FlatLayout, shards: int, path: str) -> None:
    if layout.shards != shards:
        raise PlanError(f"{path}.shards is {layout.shards}, but the unit's axis has {shards} ranks")
    if layout.numel < 0 or layout.numel % shards:
        raise PlanError(f"{path}.numel {layout.numel} does not divide by {shards} ranks")
    position = 0
    for index, segment in enumerate(layout.segments):
        if any(size < 0 for size in segment.shape):
            raise PlanError(f"{path}.segments[{index}].shape {segment.shape} has a negative size")
        if segment.offset < position or segment.end > layout.numel:
            raise PlanError(f"{path}.segments[{index}] ({segment.name!r}) overlaps another or the end of the buffer")
        position = segment.end


def _check_tiers(policy: ExecutionPolicy, group: GroupPlan, path: str) -> None:
    """What rests in host memory must have a way there and back."""
    tiers = {kind: held.tier for kind in StateKind if (held := group.placement(kind)) is not None}
    for kind, tier in tiers.items():
        if tier is Tier.NVME:
            raise PlanError(f"{path}.{kind.value}.tier is 'nvme', which is not built yet; use 'host' or 'device'")
    if group.param_on_host and (group.param.axis is None or group.param.residency is Residency.RESIDENT):
        raise PlanError(f"{path}.param.tier is 'host', which needs parameters that are sharded and gathered around use")
    if group.param_on_host and (policy.host_update is None or (group.trainable and not group.state_on_host)):
        raise PlanError(f"{path}.param.tier is 'host', which needs policy.host_update and state on the host too")
    if group.state_on_host and (policy.host_update is None or group.update_axis is None):
        raise PlanError(f"{path}: state on the host needs policy.host_update and an update_axis")
    if policy.host_update is HostUpdate.STREAMED and policy.stream_numel < 1:
        raise PlanError(f"policy.stream_numel must be above 0, is {policy.stream_numel}")
    if group.grad_on_host and not (group.state_on_host and group.staged and not policy.accumulate):
        raise PlanError(
            f"{path}.grad.tier is 'host', which needs state on the host, staged gradients and one micro-batch per step"
        )


def peer_problem(plan: Plan) -> str | None:
    """Why the plan can't run by copies between peers; None where it can."""
    groups = [(unit, group) for unit, group in plan.groups() if group.layout.shards > 1]
    if not groups:
        return "nothing is sent"
    if len({unit.axis for unit, _ in groups}) > 1:
        return "units are sharded over different axes"
    if any(group.param_on_host for _, group in groups):
        return "parameters rest in host memory"
    trainable = [group for _, group in groups if group.trainable]
    if any(group.update_axis is None for group in trainable):
        return "every rank updates all parameters (stage 0)"
    if any(group.wire == "float64" for group in trainable):
        return "gradients travel in float64"
    if plan.policy.predivide != 1.0:
        return "gradients are divided before they are summed (predivide)"
    return None


def _check_slots(slots: SlotPlan, needed: Sequence[int | None], order: Sequence[int], path: str) -> None:
    """`needed` is bytes per unit, None for a unit that needs no slot."""
    if len(slots.of_unit) != len(needed):
        raise PlanError(f"{path}.of_unit has {len(slots.of_unit)} entries for {len(needed)} units")
    if any(nbytes < 0 for nbytes in slots.nbytes):
        raise PlanError(f"{path}.nbytes has a negative size")
    for unit, (slot, nbytes) in enumerate(zip(slots.of_unit, needed, strict=True)):
        if (slot is None) != (nbytes is None):
            raise PlanError(f"{path}.of_unit[{unit}] is {slot}, but the unit {'needs one' if nbytes else 'needs none'}")
        if nbytes is not None and unit not in order:
            raise PlanError(f"order leaves out unit {unit}, which must be gathered or reduced")
        if slot is not None and not (0 <= slot < len(slots.nbytes) and slots.nbytes[slot] >= (nbytes or 0)):
            raise PlanError(f"{path}.of_unit[{unit}] is {slot}, which is no slot of {nbytes} bytes or more")


def _check_dtype(name: str, path: str) -> None:
    try:
        canonical = dtype_name(name)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    if canonical != name:
        raise PlanError(f"{path}: write {canonical!r} for {name!r}")
