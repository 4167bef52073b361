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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.placement import Placement, Residency, StateKind, Tier
from zeroshard.sharding.layout import FlatLayout, Segment
from zeroshard.sharding.slots import SlotPlan


class OnNonFinite(str, Enum):
    """What a step does when the gradients hold an inf or NaN. The update is never applied."""

    RAISE = "raise"
    SKIP = "skip"


@dataclass(frozen=True)
class ExecutionPolicy:
    """How a step runs.

    Attributes:
        prefetch: how many units are gathered ahead of the one in use.
        reuse: keep the content of released slots while it is valid; False gathers before every use.
        accumulate: several backwards per step are allowed, and gradients have an accumulator.
        overlap_step: the all-gather after a step runs beside the next forward; readers outside of it must drain first.
        predivide: gradients are divided by this before they are summed over ranks.
        mean: gradients are averaged over data-parallel ranks (else summed).
        clip_norm: global gradient norm above which gradients are scaled down; 0 means no clipping.
        on_nonfinite: what to do about inf and NaN in the gradients.
        cast_inputs: floating inputs of the model are cast to this dtype; None leaves them.
    """

    prefetch: int = 1
    reuse: bool = True
    accumulate: bool = False
    overlap_step: bool = True
    predivide: float = 1.0
    mean: bool = True
    clip_norm: float = 0.0
    on_nonfinite: OnNonFinite = OnNonFinite.RAISE
    cast_inputs: str | None = None


@dataclass(frozen=True)
class GroupPlan:
    """One flat buffer of a unit and the placement of each kind of its state.

    Attributes:
        wire: dtype in which gradients travel; "" for frozen groups.
        staged: the reduced part lands beside the slot first (to be added or converted), not in the gradient itself.
        update_axis: the axis over which the optimizer step is divided; None where every rank updates everything.
        grad, master, moments: None where the group has no such state (frozen; or the parameters are their own master).
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
        return self.numel_per_rank(placement) * itemsize(placement.dtype) * placement.copies

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

    def axis_size(self, axis: str) -> int:
        """Ranks along a mesh axis."""
        return {"dp": self.dp, "shard": self.shard, "replicate": self.dp // self.shard}[axis]

    def groups(self) -> Iterator[tuple[UnitPlan, GroupPlan]]:
        for unit in self.units:
            for group in unit.groups:
                yield unit, group

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
            return _plan_from(json.loads(text))
        except (KeyError, TypeError, json.JSONDecodeError, ValueError) as error:
            raise PlanError(f"not a zeroshard plan: {error}") from error

    def with_policy(self, **changes: Any) -> Plan:
        """The plan with some fields of its policy replaced; for fields that don't change slots or placements."""
        return replace(self, policy=replace(self.policy, **changes))


def _plan_from(data: dict[str, Any]) -> Plan:
    policy = dict(data["policy"])
    policy["on_nonfinite"] = OnNonFinite(policy["on_nonfinite"])
    return Plan(
        dp=data["dp"],
        shard=data["shard"],
        units=tuple(_unit_from(unit) for unit in data["units"]),
        order=tuple(data["order"]),
        policy=ExecutionPolicy(**policy),
        gather_slots=_slots_from(data["gather_slots"]),
        reduce_slots=_slots_from(data["reduce_slots"]),
    )


def _unit_from(data: dict[str, Any]) -> UnitPlan:
    groups = tuple(
        GroupPlan(
            layout=_layout_from(group["layout"]),
            trainable=group["trainable"],
            param=_required(_placement_from(group["param"])),
            wire=group["wire"],
            staged=group["staged"],
            update_axis=group["update_axis"],
            grad=_placement_from(group["grad"]),
            master=_placement_from(group["master"]),
            moments=_placement_from(group["moments"]),
        )
        for group in data["groups"]
    )
    aliases = tuple((alias, name) for alias, name in data["aliases"])
    return UnitPlan(data["name"], data["axis"], groups, aliases)


def _required(placement: Placement | None) -> Placement:
    if placement is None:
        raise PlanError("not a zeroshard plan: a group has no placement for its parameters")
    return placement


def _placement_from(data: dict[str, Any] | None) -> Placement | None:
    if data is None:
        return None
    return Placement(data["axis"], data["dtype"], Tier(data["tier"]), Residency(data["residency"]), data["copies"])


def _layout_from(data: dict[str, Any]) -> FlatLayout:
    segments = tuple(Segment(item["name"], tuple(item["shape"]), item["offset"]) for item in data["segments"])
    return FlatLayout(segments, data["numel"], data["shards"])


def _slots_from(data: dict[str, Any]) -> SlotPlan:
    return SlotPlan(tuple(data["nbytes"]), tuple(data["of_unit"]))
