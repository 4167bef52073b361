"""Adds accumulators for several micro-batches per step to a plan for one, while a run goes on.

Layouts, placements of parameters, master weights and moments stay, so only gradients get other memory:

    one micro-batch    wire slot --reduce-scatter--> grad (wire dtype)
    several            wire slot --reduce-scatter--> staging --add--> grad (accumulation dtype, resident)

Rejected: building the plan again from its recipe; a plan that was read from JSON or edited has no recipe.
"""

from __future__ import annotations

from dataclasses import replace

from zeroshard.plan.builder import with_order
from zeroshard.plan.dtypes import dtype_name, state_dtype
from zeroshard.plan.groups import GroupPlan
from zeroshard.plan.placement import Residency, Tier
from zeroshard.plan.plan import Plan


def with_accumulation(plan: Plan, dtype: str | None = None) -> Plan:
    """The same plan with accumulators of `dtype`; a plan that accumulates is returned as it is.

    Args:
        dtype: None is float32, and float64 for float64 parameters.
    """
    if plan.policy.accumulate:
        return plan
    kept = None if dtype is None else dtype_name(dtype)
    units = [replace(unit, groups=tuple(_accumulating(group, kept) for group in unit.groups)) for unit in plan.units]
    policy = replace(plan.policy, accumulate=True, micro_batches=1)
    return with_order(units, plan.order, policy, plan.mesh, kept=plan.kept)


def _accumulating(group: GroupPlan, wanted: str | None) -> GroupPlan:
    if group.grad is None:
        return group
    kept = wanted or state_dtype(group.param.dtype)
    grad = replace(group.grad, dtype=kept, residency=Residency.RESIDENT, tier=Tier.DEVICE)
    return replace(group, grad=grad, staged=grad.divided or kept != group.wire)
