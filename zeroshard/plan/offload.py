"""Offload: optimizer state that rests in host memory or on disk, because the device has no room for it.

    units in forward order     (root)   b0   b1   b2   b3   head
    ratio 0.6                  device ------|  host ------------     the last ones, until they hold 60 % of the elements
    and host_ratio 0.2         device ------|  host --|  disk ---     of these the first ones, 20 % at most

State on the device is updated in the step. Other state is updated during the next forward, which waits for each unit
separately; so the units that the forward uses first stay on the device.

    processor   host: master 4, moments 8, gradient 2, in whose place the parameter comes back     bytes with bf16
    streamed    host: master 4 or 2, moments 8, gradient 2; device: three buffers for pieces of them
    in codes    the same with moments of 2.03 bytes, always streamed; on disk it passes the windows below, too
    param       host: the shard of the parameters, 2; a gather copies it into its place in the slot first
    on disk     disk: master 4, moments 8; host: gradient 2 and three windows, whatever the size of the model
    and param   disk: parameter 2; host: three windows of the largest unit's shard, through which gathers read it

A gradient rests in host memory if there is one micro-batch per step and gradients are divided; accumulators stay on the
device. After ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840) and its Twin-Flow ratio. Rejected: splitting each unit
between the tiers, which would match the ratio exactly but make every unit wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real

from zeroshard.errors import PlanError
from zeroshard.nvme.places import Spill
from zeroshard.nvme.transfers import in_blocks
from zeroshard.plan.dtypes import itemsize, state_dtype
from zeroshard.plan.groups import GroupPlan, UnitPlan
from zeroshard.plan.placement import Placement, Residency, StateKind, Tier
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy, HostUpdate

STREAM_NUMEL = 1 << 24
"""Elements of a piece of streamed state: large enough for the link's full speed, small compared to a unit."""
STREAM_BUFFERS = 3
"""One is uploaded, one is updated, one is downloaded."""

WINDOW_NUMEL = 1 << 22
"""Elements of a window: 48 MiB of Adam's state, enough for a disk's full speed, and small compared to a model."""
WINDOWS = 3
"""One is read ahead, one is updated, one is written back."""
READ_WINDOWS = 3
"""For gathers of parameters on disk: one is copied to the device, one has been read, one is being read."""

ALIGNMENT = 64
"""Bytes: tensors in host memory begin at multiples of a cache line, for the widest vector instructions."""
ENOUGH_THREADS = 12
"""Number of threads per rank from which native code on the processor updates state faster than streaming it through a
GPU: a thread moves about 28 bytes per parameter at 8 GB/s, the link 24 at 71 GB/s (docs/decisions/0015)."""


@dataclass(frozen=True)
class Offload:
    """The state that rests in host memory or on disk.

    Attributes:
        tier: the tier of master weights and moments; offloaded gradients rest in host memory.
        spill: the folders on disk, for Tier.NVME.
        ratio: the least share of the optimizer state (by elements, in whole units) that is offloaded; 1 is all of it.
        param: sharded parameters are offloaded, too; needs a ratio of 1.
        param_tier: the tier of offloaded parameters.
        host_ratio: with Tier.NVME, the largest share of the optimizer state (by elements, in whole units) that rests in
            host memory instead of on disk: the first of the offloaded units.
        update: how offloaded state is updated; None lets the caller choose, and is PROCESSOR here, for moments in few
            bits STREAMED.
        stream_numel: see ExecutionPolicy.
        pin_memory: see ExecutionPolicy.
        window_numel: see ExecutionPolicy.
    """

    ratio: float = 1.0
    param: bool = False
    update: HostUpdate | None = None
    stream_numel: int = STREAM_NUMEL
    pin_memory: bool = True
    tier: Tier = Tier.HOST
    spill: Spill | None = None
    window_numel: int = WINDOW_NUMEL
    param_tier: Tier = Tier.HOST
    host_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name, share in (("ratio", self.ratio), ("host_ratio", self.host_ratio)):
            if not isinstance(share, Real) or isinstance(share, bool):
                raise PlanError(f"offload {name} {share!r} must be a number between 0 (none) and 1 (all)")
        for name, value in (("param", self.param), ("pin_memory", self.pin_memory)):
            if not isinstance(value, bool):
                raise PlanError(f"offload {name} {value!r} must be True or False")
        if self.update is not None and not isinstance(self.update, HostUpdate):
            known = ", ".join(f"HostUpdate.{update.name}" for update in HostUpdate)
            raise PlanError(f"offload update {self.update!r} must be one of {known}, or None")
        for name, tier in (("tier", self.tier), ("param_tier", self.param_tier)):
            if tier not in (Tier.HOST, Tier.NVME):
                raise PlanError(f"offload {name} {tier!r} must be Tier.HOST or Tier.NVME")
        for name, numel in (("stream_numel", self.stream_numel), ("window_numel", self.window_numel)):
            if type(numel) is not int:
                raise PlanError(f"offload {name} {numel!r} must be a whole number")
            if numel < 1:
                raise PlanError(f"offload {name} {numel} must be above 0")
        if self.spill is not None and not isinstance(self.spill, Spill):
            raise PlanError(f"offload spill {self.spill!r} must be a Spill, with the folders on disk")
        if self.param_tier is not Tier.HOST and not self.param:
            raise PlanError("offload param_tier says where parameters rest off the device, which needs param=True")
        if self.spill is not None and not self.on_disk:
            raise PlanError("offload spill names folders on disk, which needs tier or param_tier to be Tier.NVME")
        if not 0 <= self.ratio <= 1:
            raise PlanError(f"offload ratio {self.ratio} must be between 0 (none) and 1 (all)")
        if not 0 <= self.host_ratio <= self.ratio:
            raise PlanError(f"offload host_ratio {self.host_ratio} must be between 0 and the ratio, {self.ratio}")
        if self.host_ratio and self.tier is not Tier.NVME:
            raise PlanError("offload host_ratio is a part of what else goes to disk, which needs tier=Tier.NVME")
        if self.param and self.ratio != 1:
            raise PlanError(
                f"offload of parameters needs all of the optimizer's state there, but its ratio is {self.ratio}"
            )

    @property
    def on_disk(self) -> bool:
        """Whether anything rests on disk."""
        return Tier.NVME in (self.tier, self.param_tier)


def with_host_state(
    units: Sequence[UnitPlan], policy: ExecutionPolicy, offload: Offload
) -> tuple[list[UnitPlan], ExecutionPolicy]:
    """The units, root first and then in order of use, with the state of the last ones in host memory or on disk.

    Raises:
        PlanError: state that can't rest there.
    """
    chosen = _last_units(units, offload.ratio)
    # The share of the disk is rounded up, so that host memory gets no more than its share.
    below = _last_units(units, offload.ratio - offload.host_ratio)
    if not chosen and not offload.param:
        return list(units), policy
    update = offload.update or default_update(units)
    units = [_with_param(unit, offload.param_tier) for unit in units] if offload.param else units
    tiers = {index: offload.tier if index in below else Tier.HOST for index in chosen}
    moved = [_to_tier(unit, update, tiers[index]) if index in chosen else unit for index, unit in enumerate(units)]
    streamed = offload.stream_numel if update is HostUpdate.STREAMED else 0
    windowed = offload.window_numel if any(group.passes_windows for unit in moved for group in unit.groups) else 0
    return moved, replace(
        policy,
        stream_numel=streamed,
        pin_memory=offload.pin_memory,
        window_numel=windowed,
        spill=offload.spill if chosen or offload.param else None,
    )


def default_update(units: Sequence[UnitPlan]) -> HostUpdate:
    """Who updates offloaded state where that is open: the processor, but codes can only pass the device."""
    coded = any(group.in_codes for unit in units for group in unit.groups)
    return HostUpdate.STREAMED if coded else HostUpdate.PROCESSOR


def _last_units(units: Sequence[UnitPlan], ratio: float) -> set[int]:
    """As many of the last units of the forward as hold a share of the trainable elements."""
    sizes = [sum(group.layout.parameter_numel for group in unit.groups if group.trainable) for unit in units]
    wanted, chosen = ratio * sum(sizes), set[int]()
    for index in reversed(range(len(units))):
        if wanted <= 0:
            break
        if sizes[index]:
            chosen.add(index)
            wanted -= sizes[index]
    return chosen


def _with_param(unit: UnitPlan, tier: Tier) -> UnitPlan:
    """The unit with its divided parameters on a tier."""
    groups = (
        replace(group, param=replace(group.param, tier=tier)) if group.param.divided else group for group in unit.groups
    )
    return replace(unit, groups=tuple(groups))


def _to_tier(unit: UnitPlan, update: HostUpdate, tier: Tier) -> UnitPlan:
    return replace(unit, groups=tuple(_group_to_tier(unit, group, update, tier) for group in unit.groups))


def _group_to_tier(unit: UnitPlan, group: GroupPlan, update: HostUpdate, tier: Tier) -> GroupPlan:
    if group.grad is None or not (group.moments or group.master or group.param.off_device):
        return group
    if not group.update_axes:
        raise PlanError(
            f"offload: at stage 0 every rank updates all of unit {unit.label!r}, so all of its state would be on every "
            "rank's host; use stage 1, 2 or 3"
        )
    if group.owners or group.factor_ranks or group.compressed:
        what = "compressed momentum" if group.compressed else "whole matrices (Muon, Dion)"
        raise PlanError(f"offload: the state of optimizers that work on {what} stays on the device; use Adam or AdamW")
    if group.in_codes and update is HostUpdate.PROCESSOR:
        raise PlanError(
            "offload: the processor has no kernel for moments in 8 or 4 bits, which are updated while they pass the "
            "device: leave Offload.update open, or set it to HostUpdate.STREAMED, or use Adam or AdamW"
        )
    if group.in_codes and group.param.tier is Tier.NVME:
        raise PlanError(
            "offload: parameters on disk are updated by the processor, which has no kernel for moments in 8 or 4 bits; "
            "let parameters rest in host memory or on the device, or use Adam or AdamW"
        )
    grad = group.grad
    lands = grad.divided and grad.dtype == group.wire and not group.staged
    if lands:
        grad = replace(grad, tier=Tier.HOST, residency=Residency.RESIDENT)
    elif grad.residency is not Residency.RESIDENT:
        grad = replace(grad, residency=Residency.RESIDENT)
    master = group.master
    if update is HostUpdate.PROCESSOR:
        if master is not None and master.dtype != "float32":
            raise PlanError(f"offload: the processor updates float32 master weights, not {master.dtype}")
        kept = state_dtype(group.param.dtype)
        own_master = group.param.off_device and group.param.dtype == kept
        master = None if own_master else Placement(group.update_axes, kept, tier)
    elif master is not None:
        master = replace(master, tier=tier)
    moments = replace(group.moments, tier=tier) if group.moments is not None else None
    return replace(group, grad=grad, staged=group.staged or lands, master=master, moments=moments, update=update)


def has_host_gradients(group: GroupPlan) -> bool:
    """Whether gradients rest on the device and are copied to a host buffer, from which the processor reads them."""
    return group.update is HostUpdate.PROCESSOR and not group.grad_off_device


def has_host_parameters(group: GroupPlan) -> bool:
    """Whether updated parameters have their own host buffer; else they overwrite the gradients in host memory."""
    if group.update is not HostUpdate.PROCESSOR or group.param.off_device:
        return False
    return not group.grad_off_device or group.wire != group.param.dtype


def buffer_host_nbytes(group: GroupPlan) -> int:
    """Bytes of a group's host buffers for gradients and updated parameters."""
    numel, found = group.layout.shard_numel, 0
    if group.grad is not None and has_host_gradients(group):
        found += numel * itemsize(group.grad.dtype)
    return found + (numel * itemsize(group.param.dtype) if has_host_parameters(group) else 0)


def group_host_nbytes(group: GroupPlan) -> int:
    """Bytes of host memory that one rank takes for a group."""
    held = (group.param, group.grad, group.master, group.moments)
    numel = group.layout.shard_numel
    resting = sum(one.nbytes(numel) for one in held if one is not None and one.tier is Tier.HOST)
    return resting + buffer_host_nbytes(group)


def aligned(nbytes: int) -> int:
    """The bytes after which the next tensor begins in host memory."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def window_nbytes(plan: Plan) -> int:
    """Bytes of all windows in host memory for updates of state on disk."""
    passing = [group for _, group in plan.groups() if group.passes_windows]
    return WINDOWS * max((_window_nbytes(group, plan.policy.window_numel) for group in passing), default=0)


def _window_nbytes(group: GroupPlan, numel: int) -> int:
    """Bytes of a window for a piece of a group's state; each row takes whole disk blocks, for direct I/O."""
    held = (one for one in (group.param, group.master, group.moments) if one is not None)
    numel = group.piece_numel(numel)
    return sum(in_blocks(nbytes) for one in held if one.tier is Tier.NVME for nbytes in one.rows(numel))


def read_window_nbytes(plan: Plan) -> int:
    """Bytes of each window in host memory for gathers of parameters on disk; 0 without any.

    A window holds the shard of any unit, so it is never larger than a slot on the device.
    """
    return max((sum(map(_param_disk_nbytes, unit.groups)) for unit in plan.units), default=0)


def _param_disk_nbytes(group: GroupPlan) -> int:
    """Bytes of a group's parameters on disk, in whole blocks."""
    return in_blocks(group.held_on(Tier.NVME, StateKind.PARAM))


def windows_nbytes(plan: Plan) -> int:
    """Bytes of all windows in host memory, for updates and for gathers."""
    return window_nbytes(plan) + READ_WINDOWS * read_window_nbytes(plan)


def disk_nbytes(plan: Plan) -> int:
    """Bytes of disk that one rank takes under `plan`."""
    return sum(
        in_blocks(nbytes)
        for _, group in plan.groups()
        for one in (group.param, group.master, group.moments)
        if one is not None and one.tier is Tier.NVME
        for nbytes in one.rows(group.layout.shard_numel)
    )


def update_disk_nbytes(group: GroupPlan) -> tuple[int, int]:
    """Bytes of a group that one rank's update reads from disk, and those that it writes there."""
    if group.update is None:
        return 0, 0
    both = sum(group.held_on(Tier.NVME, kind) for kind in (StateKind.MASTER, StateKind.MOMENTS))
    param = group.held_on(Tier.NVME, StateKind.PARAM)
    return both + (param if group.master is None else 0), both + param


def host_nbytes(plan: Plan) -> int:
    """Bytes of host memory that one rank takes under `plan`."""
    return sum(group_host_nbytes(group) for _, group in plan.groups()) + windows_nbytes(plan)


def stream_nbytes(group: GroupPlan, numel: int) -> int:
    """Bytes of a piece of `numel` elements in a streaming buffer."""
    held = (group.master, group.moments, group.grad, group.param)
    return sum(one.nbytes(numel) for one in held if one is not None and one.off_device)


def stream_buffer_nbytes(plan: Plan) -> tuple[int, ...]:
    """Bytes of each device buffer for streamed state; () if no state is streamed."""
    pieces = (
        stream_nbytes(group, group.piece_numel(plan.policy.stream_numel))
        for _, group in plan.groups()
        if group.update is HostUpdate.STREAMED
    )
    widest = max(pieces, default=0)
    return (widest,) * STREAM_BUFFERS if widest else ()


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes between device and host on one rank in a step: `down` to the host, `up` to the device."""

    down: int
    up: int


def link_traffic(plan: Plan) -> LinkTraffic:
    """The bytes that an update moves between device and host, without gathers of parameters in host memory."""
    down = up = 0
    for _, group in plan.groups():
        if group.update is None or group.grad is None:
            continue
        numel, grad = group.layout.shard_numel, itemsize(group.grad.dtype)
        if group.update is HostUpdate.PROCESSOR:
            down += numel * grad
            up += numel * itemsize(group.param.dtype)
        else:
            passing = stream_nbytes(group, numel)
            down += passing  # the state goes down after the update, the gradient before it
            up += passing
    return LinkTraffic(down, up)
