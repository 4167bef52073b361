"""Offload as an edit of a plan: the same placements, resting in another tier.

    none        everything on the device
    cpu         master weights, moments and gradients on the host; the optimizer steps there
    cpu+param   and the parameters' shards too; each gather copies its shard up first
    nvme        master weights and moments in files, parameters and gradients on the host

Gradients always go down with the optimizer. (ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857.)
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from zeroshard.plan.placement import Placement, Residency, Tier
from zeroshard.plan.plan import GroupPlan, Plan


class Offload(str, Enum):
    """What rests off the device."""

    NONE = "none"
    CPU = "cpu"
    CPU_PARAM = "cpu+param"
    NVME = "nvme"

    @property
    def states(self) -> Tier:
        """Where master weights and moments rest."""
        return {Offload.NONE: Tier.DEVICE, Offload.NVME: Tier.NVME}.get(self, Tier.HOST)

    @property
    def parameters(self) -> Tier:
        return Tier.HOST if self in (Offload.CPU_PARAM, Offload.NVME) else Tier.DEVICE


def allowed(offload: Offload, stage: int) -> bool:
    """Optimizer states can go from stage 1 up, parameters at stage 3 only."""
    if offload is Offload.NONE:
        return True
    return stage >= 3 if offload.parameters is Tier.HOST else stage >= 1


def offloaded(plan: Plan, offload: Offload) -> Plan:
    """`plan` with its state in the tiers of `offload`."""
    if offload is Offload.NONE:
        return plan
    units = tuple(replace(unit, groups=tuple(_group(group, offload) for group in unit.groups)) for unit in plan.units)
    return replace(plan, units=units)


def staging_nbytes(plan: Plan, offload: Offload) -> int:
    """Device bytes through which shards pass, two at a time: parameters up, gradients down."""
    if offload is Offload.NONE:
        return 0
    shards = [
        sum(group.layout.shard_numel * 2 for group in unit.groups if group.trainable or offload.parameters is Tier.HOST)
        for unit in plan.units
    ]
    return 2 * max(shards, default=0) * (2 if offload.parameters is Tier.HOST else 1)


def _group(group: GroupPlan, offload: Offload) -> GroupPlan:
    param = _moved(group.param, offload.parameters)
    assert param is not None
    if not group.trainable or group.grad is None:
        return replace(group, param=param)
    # Whole gradients (stage 1) are reduced on the device; this rank's part goes down and the rest stays.
    grad = group.grad if group.grad.axis is None else replace(group.grad, tier=Tier.HOST, residency=Residency.RESIDENT)
    return replace(
        group,
        param=param,
        grad=grad,
        master=_moved(group.master, offload.states),
        moments=_moved(group.moments, offload.states),
    )


def _moved(placement: Placement | None, tier: Tier) -> Placement | None:
    return None if placement is None else replace(placement, tier=tier)
