"""The plan: a frozen value that says where every byte of training state lives and how a step runs.

    Plan
     +- units[i]: UnitPlan            what is gathered and reduced together, and the mesh axes it is laid out over
     |   +- groups[j]: GroupPlan      one flat buffer per (dtype, trainable): layout and placement of each state kind
     +- order                         units as forward uses them
     +- policy: ExecutionPolicy       prefetch, slots, accumulation, gradient scaling
     +- gather_slots, reduce_slots    which buffer each unit uses, and how large the buffers are
     +- sum_slots                     the same for sums over micro-batches that pass a unit in turn

The planner, the memory table, the traffic count and the engine read the same object, so the printed numbers are those
of the run. A plan can be printed, compared, and saved as JSON. Rejected: decisions of the engine at run time, by flags;
they cause bugs between stages, and memory and traffic could not be known before a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.field_types import check_fields
from zeroshard.mesh import Mesh
from zeroshard.plan.check import check_plan
from zeroshard.plan.decode import decode
from zeroshard.plan.groups import GroupPlan, UnitPlan
from zeroshard.plan.legs import GroupLegs, LoweringOptions, lower
from zeroshard.plan.placement import StateKind
from zeroshard.plan.policy import ExecutionPolicy, HostUpdate
from zeroshard.sharding.slots import NO_SLOTS, SlotPlan


@dataclass(frozen=True)
class Plan:
    """Where every byte of training state lives, and how a step runs. See the module's picture."""

    mesh: Mesh
    units: tuple[UnitPlan, ...]
    order: tuple[int, ...]
    policy: ExecutionPolicy
    gather_slots: SlotPlan
    reduce_slots: SlotPlan
    kept: tuple[int, ...] = ()
    """Units besides the root that stay gathered for a whole pass, because modules of other units read them."""
    sum_slots: SlotPlan = NO_SLOTS
    """The buffers in which gradients are summed over the micro-batches that pass a unit in turn; none without any."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_plan(self)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.mesh.data_parallel_size

    @property
    def summed_ranks(self) -> int:
        """Ranks over which gradients are summed: those of data, and those that share sequences."""
        return self.mesh.size(self.mesh.summed)

    def groups(self) -> Iterator[tuple[UnitPlan, GroupPlan]]:
        for unit in self.units:
            for group in unit.groups:
                yield unit, group

    @cached_property
    def legs(self) -> tuple[tuple[GroupLegs, ...], ...]:
        """Per unit and group the legs of gathers and reduces, which are executed, counted and timed."""
        policy = self.policy
        options = LoweringOptions(policy.peer_copies, policy.accumulate, policy.predivide != 1.0)
        return tuple(tuple(lower(unit, group, options) for group in unit.groups) for unit in self.units)

    @cached_property
    def off_device(self) -> bool:
        """Whether anything rests off the device."""
        held = (group.placement(kind) for _, group in self.groups() for kind in StateKind)
        return any(placement is not None and placement.off_device for placement in held)

    @cached_property
    def updates(self) -> frozenset[HostUpdate]:
        """How optimizer state that rests off the device is updated; empty where none does."""
        return frozenset(group.update for _, group in self.groups() if group.update is not None)

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
        except (PlanError, ValueError, OverflowError, RecursionError) as error:
            raise PlanError(f"not a zeroshard plan: {error}") from error
        return plan

    def with_policy(self, **changes: Any) -> Plan:
        """The plan with some fields of its policy replaced; for fields that don't change slots or placements."""
        return replace(self, policy=replace(self.policy, **changes))
