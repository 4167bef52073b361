"""Storage: the tensors behind a plan on one rank. It allocates exactly what the plan says and knows who views what.

For each group of each unit:

    whole      compute dtype, all ranks' parts: a slot shared with other units, or a buffer that stays
    shard      compute dtype, this rank's part: a buffer of its own, or this rank's slice of `whole`
    views      one per parameter into `whole`; what `parameter.data` is while the unit is in use. Where ranks copy from
               each other, a parameter that lies within `shard` is a view of that: it is there already
    grad       where reduced gradients rest: the whole or this rank's part
    wire       whole gradients in wire dtype on their way out, in a reduce slot; `staging` is this rank's reduced part
    master     float32 truth of the part that this rank updates; the parameters themselves where they are float32

Where the plan lets the optimizer's state rest in host memory, `master` is there, `grad` may be (gradients pass through
`staging` on the device), and for an update by the processor so are `landed`, what it reads, and `returning`, what it
writes: the same buffer where gradients and parameters have one dtype and the gradients rest there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from zeroshard.engine.memory.guard import ShardedGradient, sharded_gradient
from zeroshard.engine.memory.host_memory import HostMemory
from zeroshard.engine.memory.loose_values import take_whole
from zeroshard.optim.split import join, split
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.offload import lands_beside, returns_beside
from zeroshard.plan.placement import Placement, Residency, Tier
from zeroshard.plan.plan import GroupPlan, HostUpdate, Plan, UnitPlan
from zeroshard.sharding.layout import Segment


class Allocator(Protocol):
    """Where the memory comes from that other ranks reach; called by all ranks in the same order."""

    def shard(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros that are gathered from: a shard, or whole parameters of which each rank updates a part."""
        ...

    def slots(self, nbytes: Sequence[int]) -> list[torch.Tensor]:
        """Zeros of so many bytes each, uint8; a second call replaces the first."""
        ...


class OwnMemory:
    """Memory of this rank alone, from torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def shard(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def slots(self, nbytes: Sequence[int]) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in nbytes]


@dataclass
class Group:
    """The tensors of one flat group on this rank."""

    plan: GroupPlan
    rank: int
    parameters: list[nn.Parameter]
    whole: torch.Tensor
    shard: torch.Tensor
    views: list[torch.Tensor]
    empties: list[torch.Tensor]
    master: torch.Tensor | None = None
    grad: torch.Tensor | None = None
    wire: torch.Tensor | None = None
    staging: torch.Tensor | None = None
    landed: torch.Tensor | None = None
    returning: torch.Tensor | None = None
    local: torch.Tensor | None = None
    """Whole local gradients of sharded gradients; only there once a backward ran under no_sync."""
    in_shard: frozenset[int] = frozenset()
    """Numbers of the parameters that are used where they lie in `shard`; no gather puts them into `whole`."""
    lent: set[int] = field(default_factory=set)
    """Numbers of the parameters that a GatheredParameters holds whole, in memory of its own."""
    _stand_ins: list[torch.Tensor] = field(default_factory=list)
    _stand_in_shapes: list[torch.Size] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where the group computes."""
        return self.whole.device

    @property
    def update_range(self) -> tuple[int, int]:
        """The elements that this rank's optimizer step updates."""
        if self.plan.update_axis is None:
            return 0, self.plan.layout.numel
        return self.plan.layout.shard_range(self.rank)

    @property
    def update_param(self) -> torch.Tensor:
        """The compute-dtype parameters that this rank's optimizer step writes."""
        return self.whole if self.plan.update_axis is None else self.shard

    @property
    def update_master(self) -> torch.Tensor:
        """What the optimizer step keeps beside (or as) the parameters: float32, or the remainder of split masters."""
        return self.update_param if self.master is None else self.master

    @property
    def split(self) -> bool:
        """Whether master weights are the parameters and a 16-bit remainder."""
        return self.master is not None and self.master.dtype == torch.int16

    def master_values(self) -> torch.Tensor:
        """The parameters that this rank updates, in float32 where there are master weights; on the device."""
        if self.master is None:
            return self.update_param.to(self.device)
        master = self.master.to(self.device)
        return join(self.update_param.to(self.device), master) if self.split else master

    @property
    def own_grad(self) -> torch.Tensor:
        """This rank's part of the reduced gradients."""
        assert self.grad is not None
        assert self.plan.grad is not None
        if self.plan.grad.axis is not None:
            return self.grad
        start, end = self.plan.layout.shard_range(self.rank)
        return self.grad[start:end]

    def own_pieces(self) -> list[tuple[int, int]]:
        """What of this rank's part of the group belongs to parameters: (start, end), relative to the part."""
        return [(low, high) for _, low, high in self.plan.layout.pieces(*self.plan.layout.shard_range(self.rank))]

    @property
    def copied(self) -> list[tuple[int, int]]:
        """The elements of the shard that a gather puts into `whole`: parameters that cross the border of the shard."""
        pieces = self.plan.layout.pieces(*self.plan.layout.shard_range(self.rank))
        return [(low, high) for index, low, high in pieces if index not in self.in_shard]

    def place_views(self) -> None:
        """Make the views, after `whole`, `shard` and `in_shard` have been set."""
        self.views = [self._in_whole(index) for index in range(len(self.parameters))]
        start, _ = self.plan.layout.shard_range(self.rank)
        for index in self.in_shard:
            segment = self.plan.layout.segments[index]
            self.views[index] = self.shard[segment.offset - start : segment.end - start].view(segment.shape)

    def _in_whole(self, index: int) -> torch.Tensor:
        segment = self.plan.layout.segments[index]
        return self.whole[segment.offset : segment.end].view(segment.shape)

    def stand_ins(self) -> list[torch.Tensor]:
        """What each parameter's `grad` is while its gradients are in the engine's buffers."""
        shapes = [parameter.shape for parameter in self.parameters]
        if shapes != self._stand_in_shapes:
            # On the slot, not on the shard: what autograd adds to a stand-in is refused, and must harm nothing.
            self._stand_ins = [
                sharded_gradient(self._in_whole(index) if index in self.in_shard and parameter.numel() else parameter)
                for index, parameter in enumerate(self.parameters)
            ]
            self._stand_in_shapes = shapes
        return self._stand_ins

    def fit_stand_ins(self) -> None:
        """Amid an accumulation: stand-ins get the shape of whole parameters, as torch.compile wants them."""
        if type(self.parameters[0].grad) is not ShardedGradient:
            return
        for parameter, stand_in in zip(self.parameters, self.stand_ins(), strict=True):
            if type(parameter.grad) is ShardedGradient and parameter.grad is not stand_in:
                parameter.grad = stand_in

    def take_grad(self) -> torch.Tensor:
        """This rank's reduced gradients; allocated now where they are there between backward and step only."""
        if self.grad is None:
            assert self.plan.grad is not None
            numel, dtype = self.plan.numel_per_rank(self.plan.grad), torch_dtype(self.plan.grad.dtype)
            self.grad = torch.empty(numel, dtype=dtype, device=self.device)
        return self.own_grad

    @property
    def step_param(self) -> torch.Tensor | None:
        """What an update writes in compute dtype beside `update_master`; None where that is all there is."""
        if self.returning is not None:
            return self.returning
        return None if self.master is None else self.update_param

    @property
    def step_grad(self) -> torch.Tensor:
        """The reduced gradients that an update reads, where it reads them."""
        return self.update_grad if self.landed is None else self.landed

    def drop_grad(self) -> None:
        """The step has read the gradients: give back what was taken for them."""
        if self.plan.grad is not None and self.plan.grad.residency is Residency.AROUND_USE:
            self.grad = None

    @property
    def update_grad(self) -> torch.Tensor:
        """The reduced gradients of the elements that this rank updates."""
        assert self.grad is not None
        return self.grad if self.plan.update_axis is None else self.own_grad

    @property
    def held_range(self) -> tuple[int, int]:
        """The elements whose truth this rank holds: those that it updates, or of a frozen group its shard."""
        if not self.plan.trainable and self.plan.param.axis is not None:
            return self.plan.layout.shard_range(self.rank)
        return self.update_range if self.plan.trainable else (0, self.plan.layout.numel)

    @property
    def held_param(self) -> torch.Tensor:
        """The compute-dtype parameters of `held_range`."""
        whole = self.held_range == (0, self.plan.layout.numel) and self.plan.param.axis is None
        return self.whole if whole else self.shard

    def own_part(self, index: int) -> tuple[slice, slice]:
        """What this rank holds of a parameter: as a slice of `held_range`, and of the flat parameter."""
        return self._overlap(self.plan.layout.segments[index], *self.held_range)

    def write_part(self, own: slice, values: torch.Tensor) -> None:
        """Set elements of `held_range` from float32 values, master weights first."""
        if self.master is not None:
            self._write_master(own, values)
        self.held_param[own].copy_(split(values)[0] if self.split else values)

    def write(self, index: int, value: torch.Tensor) -> None:
        """Set parameter `index` of the group from its whole value, on every state that this rank holds of it."""
        segment, flat = self.plan.layout.segments[index], value.detach().reshape(-1)
        if self.master is not None:
            own, of_value = self._overlap(segment, *self.update_range)
            self._write_master(own, flat[of_value].float())
        self._write_param(segment, flat)

    def _write_master(self, own: slice, values: torch.Tensor) -> None:
        assert self.master is not None
        self.master[own].copy_(split(values.to(self.master.device))[1] if self.split else values)

    def write_changed(self, index: int, value: torch.Tensor, before: torch.Tensor | None = None) -> None:
        """As `write` from a compute-dtype value, but master weights keep their precision where nothing changed.

        Args:
            before: the whole parameter as it was, where it has been changed in place; else it is read from its shard.
        """
        segment, flat = self.plan.layout.segments[index], value.detach().reshape(-1)
        if self.master is not None:
            own, of_value = self._overlap(segment, *self.update_range)
            old, new = self.master_values()[own], flat[of_value].to(self.device)
            current = self.update_param[own].to(self.device) if before is None else before.reshape(-1)[of_value]
            kept = torch.where(current == new, old, new.float())
            self._write_master(own, kept)
        self._write_param(segment, flat)

    def follow(self, index: int, value: torch.Tensor) -> None:
        """Let master weights follow a whole parameter that was changed in place; unchanged elements keep precision."""
        own, of_value = self._overlap(self.plan.layout.segments[index], *self.update_range)
        old, new = self.master_values()[own], value.reshape(-1)[of_value]
        self._write_master(own, torch.where(old.to(new.dtype) == new, old, new.float()))

    def _write_param(self, segment: Segment, flat: torch.Tensor) -> None:
        if self.split and flat.dtype != self.whole.dtype:
            flat = split(flat.float())[0]  # rounded as its master weights are
        if self.plan.param.axis is None:
            self.whole[segment.offset : segment.end].copy_(flat)
        else:
            own, of_value = self._overlap(segment, *self.plan.layout.shard_range(self.rank))
            self.shard[own].copy_(flat[of_value])

    @staticmethod
    def _overlap(segment: Segment, start: int, end: int) -> tuple[slice, slice]:
        """What a segment and [start, end) have in common: as a slice of the range, and of the segment."""
        low = max(start, segment.offset)
        high = max(low, min(end, segment.end))
        return slice(low - start, high - start), slice(low - segment.offset, high - segment.offset)


@dataclass
class Unit:
    """A unit's groups and whether its parameters have their full shape just now."""

    plan: UnitPlan
    index: int
    groups: list[Group]
    in_use: bool = False
    trainable: list[Group] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.plan.label


class Storage:
    """All tensors of a plan on one rank.

    Args:
        parameters: the model's parameters by name; their data is replaced by views or by empty tensors.
        rank_of: this rank's position along a mesh axis.
        device: where the state lives.
        allocator: where shards and reduce slots come from, instead of torch's allocator.
        host: where the state comes from that rests in host memory; needed if the plan has some.

    Allocates unit by unit and takes over each parameter's values on the way, so that starting up holds at most one
    unit twice. Parameters on the meta device have no values; they are written later through `Group.write`.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        rank_of: Mapping[str, int],
        device: torch.device,
        allocator: Allocator | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self.plan = plan
        self.device = device
        self.host = host
        self._own = OwnMemory(device)
        self._shared = self._own if allocator is None else allocator
        self.units: list[Unit] = []
        self._allocate_slots(plan)
        for index, unit in enumerate(plan.units):
            groups = [self._allocate(group, parameters, rank_of[unit.axis]) for group in unit.groups]
            self.units.append(Unit(unit, index, groups, trainable=[g for g in groups if g.plan.trainable]))
        self.place_slots(plan)

    def _allocate_slots(self, plan: Plan) -> None:
        self.gather_slots = self._own.slots(plan.gather_slots.nbytes)
        self.reduce_slots = self._shared.slots(plan.reduce_slots.nbytes)

    def _allocate(self, plan: GroupPlan, parameters: Mapping[str, nn.Parameter], rank: int) -> Group:
        layout, dtype = plan.layout, torch_dtype(plan.param.dtype)
        nothing = torch.empty(0, dtype=dtype, device=self.device)
        if plan.param.axis is None:
            whole = self._shard(plan, layout.numel)
            start, end = layout.shard_range(rank)
            shard = whole[start:end]
        else:
            whole, shard = nothing, self._shard(plan, layout.shard_numel)
        members = [parameters[segment.name] for segment in layout.segments]
        empties = [torch.empty(0, dtype=dtype, device=self.device) for _ in members]
        group = Group(plan, rank, members, whole, shard, [], empties)
        if plan.master is not None:
            start, end = group.update_range
            group.master = self._zeros(end - start, plan.master)
        group.grad = self._resident_grad(plan)
        self._place_on_host(group)
        for index, parameter in enumerate(members):
            if not parameter.is_meta:
                group.write(index, take_whole(parameter))
                parameter.data = empties[index]
            parameter.grad = None
        return group

    def _shard(self, plan: GroupPlan, numel: int) -> torch.Tensor:
        if plan.param_on_host:
            return self._zeros(numel, plan.param)
        return (self._shared if plan.travels else self._own).shard(numel, torch_dtype(plan.param.dtype))

    def place_slots(self, plan: Plan) -> None:
        """Point every group at its part of its unit's slots, and every parameter at its resting data."""
        self.plan = plan
        for unit in self.units:
            unit.plan = plan.units[unit.index]
            self._place_gathered(unit, plan.gather_slots.of_unit[unit.index])
            self._place_reduced(unit, plan.reduce_slots.of_unit[unit.index])

    def adopt(self, plan: Plan) -> None:
        """Take the slots and gradients of a plan with another order, or with accumulators; nothing may be in flight."""
        self.plan = plan
        for unit in self.units:
            for group, planned in zip(unit.groups, plan.units[unit.index].groups, strict=True):
                if group.plan.grad != planned.grad:
                    group.grad = group.local = None
                group.plan = planned
                if group.grad is None:
                    group.grad = self._resident_grad(planned)
                self._place_on_host(group)
        self._allocate_slots(plan)
        self.place_slots(plan)

    def _resident_grad(self, plan: GroupPlan) -> torch.Tensor | None:
        if plan.grad is None or plan.grad.residency is not Residency.RESIDENT:
            return None
        return self._zeros(plan.numel_per_rank(plan.grad), plan.grad)

    def _zeros(self, numel: int, placement: Placement) -> torch.Tensor:
        dtype = torch_dtype(placement.dtype)
        if placement.tier is Tier.HOST:
            assert self.host is not None
            return self.host.zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def _place_on_host(self, group: Group) -> None:
        """Buffers on the host through which the processor gets gradients and gives parameters back."""
        policy, plan = self.plan.policy, group.plan
        if not plan.state_on_host or policy.host_update is not HostUpdate.PROCESSOR:
            return
        assert plan.grad is not None
        assert self.host is not None
        numel, dtype = plan.layout.shard_numel, torch_dtype(plan.grad.dtype)
        first = group.returning is None
        if not lands_beside(plan, policy):
            group.landed = group.grad
        elif group.landed is None or group.landed.dtype != dtype:
            if not first:  # a plan that begins to accumulate in mid-run
                self.host.reserve(numel * dtype.itemsize)
            group.landed = self.host.zeros(numel, dtype)
        if first:  # else it may have been in the place of the gradients, and stays there when they are accumulated
            if plan.param_on_host:
                return
            own = returns_beside(plan, policy)
            group.returning = self.host.zeros(numel, torch_dtype(plan.param.dtype)) if own else group.grad

    def _place_gathered(self, unit: Unit, slot: int | None) -> None:
        offset = 0
        for group in unit.groups:
            if slot is not None:
                nbytes = group.plan.gathered_nbytes
                dtype = torch_dtype(group.plan.param.dtype)
                group.whole = self.gather_slots[slot][offset : offset + nbytes].view(dtype)
                offset += nbytes
            peers = self._shared is not self._own and slot is not None and group.plan.travels
            own = group.plan.layout.shard_range(group.rank)
            group.in_shard = frozenset(group.plan.layout.within(*own) if peers else ())
            group.place_views()
            resting = group.views if group.plan.param.residency is Residency.RESIDENT else group.empties
            for parameter, data in zip(group.parameters, resting, strict=True):
                if not parameter.is_meta:
                    parameter.data = data
        unit.in_use = slot is None

    def _place_reduced(self, unit: Unit, slot: int | None) -> None:
        offset = 0
        for group in unit.trainable:
            if not group.plan.needs_reduce_slot:
                continue
            dtype = torch_dtype(group.plan.wire)
            if slot is None:  # parameters without elements: there is nothing to send
                group.wire = torch.empty(0, dtype=dtype, device=self.device)
                group.staging = torch.empty(0, dtype=dtype, device=self.device) if group.plan.staged else None
                continue
            nbytes, staging = group.plan.wire_nbytes, group.plan.staging_nbytes
            group.wire = self.reduce_slots[slot][offset : offset + nbytes].view(dtype)
            offset += nbytes
            group.staging = self.reduce_slots[slot][offset : offset + staging].view(dtype) if staging else None
            offset += staging
