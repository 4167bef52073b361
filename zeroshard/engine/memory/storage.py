"""Storage: allocates the tensors of a plan on one rank, exactly as the plan says, and makes the views into them.

For each group of each unit:

    whole      compute dtype, all ranks' parts: a slot shared with other units, or a buffer that stays
    shard      compute dtype, this rank's part: a buffer of its own, or this rank's slice of `whole`
    second     compute dtype, this rank's part of the copy that each subgroup has, where the plan has one
    views      one per parameter into `whole`; `parameter.data` is this view while the unit is in use. If ranks copy
               from each other, a parameter that lies within `shard` is a view of that, and is not gathered
    grad       where reduced gradients rest: the whole or this rank's part
    wire       whole gradients in wire dtype before their reduce, in a reduce slot; `staging` is the reduced part
    master     float32 master weights of the part that this rank updates; float32 parameters are their own masters

If the optimizer's state rests in host memory, so does `master`, and possibly `grad` (gradients then pass through
`staging` on the device). For an update by the processor host memory also has `landed`, the gradients that it reads, and
`returning`, the parameters that it writes: one buffer if both have one dtype and the gradients rest in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from zeroshard.engine.memory.dtensor_group import DTensorGroup
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.rank_values import write_parameter
from zeroshard.engine.memory.scaled_group import ScaledGroup
from zeroshard.engine.memory.tiers import Tiers
from zeroshard.engine.memory.unit import Unit, UnitState
from zeroshard.engine.memory.update_view import update_range
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.groups import GroupPlan
from zeroshard.plan.hops import ERROR_DTYPE
from zeroshard.plan.legs import local_dtype
from zeroshard.plan.offload import (
    READ_WINDOWS,
    has_host_gradients,
    has_host_parameters,
    read_window_nbytes,
    window_nbytes,
)
from zeroshard.plan.placement import Placement, Residency, Tier
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import HostUpdate
from zeroshard.sharding.dtensors import as_dtensor, prepare_holder
from zeroshard.sharding.resting import Resting, expanded, expanded_nan, whole_class
from zeroshard.sharding.unowned_values import take_whole
from zeroshard.tiers import Row, values_of


class Allocator(Protocol):
    """Allocates memory that other ranks can access; called by all ranks in the same order."""

    def shard(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros from which ranks gather: a shard, or whole parameters of which each rank updates a part."""
        ...

    def slots(self, nbytes: Sequence[int]) -> list[torch.Tensor]:
        """Zeros of so many bytes each, uint8; a second call replaces the first."""
        ...


class Storage:
    """All tensors of a plan on one rank.

    Args:
        parameters: the model's parameters by name; their data is replaced by views or by empty tensors.
        rank: this rank's number in the plan's mesh.
        device: where the state lives.
        allocator: allocates shards and reduce slots; by default torch's allocator.
        tiers: allocate all other state.

    It allocates one unit after the other and copies the parameters' values at once, so that at most one unit is held
    twice. Parameters on the meta device have no values; they are written later (rank_values).
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        device: torch.device,
        tiers: Tiers,
        allocator: Allocator | None = None,
    ) -> None:
        self.plan = plan
        self.device = device
        self.tiers = tiers
        self._at_rest: dict[torch.dtype, torch.Tensor] = {}
        self._shared = allocator
        self.units: list[Unit] = []
        nbytes = window_nbytes(plan)
        self.window = values_of(tiers[Tier.HOST].allocate(nbytes, torch.uint8)) if nbytes else None
        """Host memory to read and write state that does not lie in place. Allocated first, so it begins at a page."""
        nbytes = read_window_nbytes(plan)
        self.read_windows = [
            values_of(tiers[Tier.HOST].allocate(nbytes, torch.uint8)) for _ in range(READ_WINDOWS if nbytes else 0)
        ]
        """Host memory to read parameters that do not lie in place for gathers. Allocated second, so also at pages."""
        self._allocate_slots(plan)
        for index, unit in enumerate(plan.units):
            groups = [
                self._allocate(group, parameters, plan.mesh.position(rank, unit.axes_of(group)))
                for group in unit.groups
            ]
            for group in groups:
                group.counts = plan.mesh.first(rank, (*unit.axes_of(group.plan), *group.plan.model_axes))
            trainable = [group for group in groups if group.plan.trainable]
            self.units.append(Unit(unit, index, groups, trainable=trainable))
        self.place_slots(plan)

    def _allocate_slots(self, plan: Plan) -> None:
        self.gather_slots = self._slots(plan.gather_slots.nbytes)
        coded = any(group.record_nbytes for _, group in plan.groups())
        self.records = self.gather_slots[-1] if coded else None
        """The buffer of quantized gathers, used by one gather after the other."""
        shared, nbytes = self._shared, plan.reduce_slots.nbytes
        self.reduce_slots = self._slots(nbytes) if shared is None else shared.slots(nbytes)
        self.sum_slots = self._slots(plan.sum_slots.nbytes)
        summed = any(group.hops for _, group in plan.groups())
        self.exchange = self.reduce_slots[-1] if summed else None
        """The buffer of quantized reduces, used by one group after the other."""

    def _slots(self, nbytes: Sequence[int]) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.uint8, device=self.device) for size in nbytes]

    def _allocate(self, plan: GroupPlan, parameters: Mapping[str, nn.Parameter], rank: int) -> Group:
        layout, dtype = plan.layout, torch_dtype(plan.param.dtype)
        nothing = torch.empty(0, dtype=dtype, device=self.device)
        if not plan.param.divided:
            whole, row = self._shard(plan, layout.numel)
            start, end = layout.shard_range(rank)
            shard = whole[start:end]
        else:
            whole = nothing
            shard, row = self._shard(plan, layout.shard_numel)
        members = [parameters[segment.name] for segment in layout.segments]
        shown = torch_dtype(plan.shown_dtype)
        one = self._at_rest.setdefault(shown, expanded_nan((1,), shown, self.device))
        empties = [expanded(one, segment.shape) for segment in layout.segments]
        records = [Resting(segment.name) for segment in layout.segments]
        classes = [whole_class(member) for member in members]
        plain = ScaledGroup if plan.scaled else Group
        kind = plain if all(as_dtensor(member) is None for member in members) else DTensorGroup
        group = kind(plan, rank, members, whole, shard, [], empties, records, classes, members, row=row)
        if plan.second is not None and plan.param.divided:
            group.second = torch.zeros(plan.second_numel, dtype=dtype, device=self.device)
        elif plan.second is not None:
            group.second = whole[slice(*plan.second_range(rank))]
        if plan.master is not None:
            start, end = update_range(group)
            group.master = self._row(end - start, plan.master)
        group.grad = self._resident_grad(plan)
        errors = torch_dtype(ERROR_DTYPE)
        group.errors = [torch.zeros(n, dtype=errors, device=self.device) if n else None for n in plan.error_numels]
        self._place_on_host(group)
        for index, parameter in enumerate(members):
            if not parameter.is_meta:
                write_parameter(group, index, take_whole(parameter))
                prepare_holder(parameter, empties[index])
                group.hide_one(index)
            parameter.grad = None
        group.find_holders()
        return group

    def _shard(self, plan: GroupPlan, numel: int) -> tuple[torch.Tensor, Row | None]:
        """The shard's elements in place; or a meta tensor, and the row that the elements have to be read from."""
        dtype = torch_dtype(plan.param.dtype)
        if self._shared is not None and plan.is_gathered and not plan.param.off_device:
            return self._shared.shard(numel, dtype), None
        row = self._row(numel, plan.param)
        if row.values is not None:
            return row.values, None
        return torch.empty(numel, dtype=dtype, device="meta"), row

    def place_slots(self, plan: Plan) -> None:
        """Point every group at its part of its unit's slots, and every parameter at its resting data."""
        self.plan = plan
        for unit in self.units:
            unit.plan = plan.units[unit.index]
            self._place_gathered(unit, plan.gather_slots.of_unit[unit.index])
            self._place_reduced(unit, plan.reduce_slots.of_unit[unit.index])
            self._place_sums(unit, plan.sum_slots.of_unit[unit.index] if plan.sum_slots.of_unit else None)

    def adopt(self, plan: Plan) -> None:
        """Allocate slots and gradients for a plan with another order or accumulators; no operation may be running."""
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
        return values_of(self._row(plan.numel_per_rank(plan.grad), plan.grad))

    def _row(self, numel: int, placement: Placement) -> Row:
        return self.tiers[placement.tier].allocate(numel, torch_dtype(placement.dtype))

    def _place_on_host(self, group: Group) -> None:
        """Allocate the host buffers of an update by the processor: gradients to read, and parameters to write."""
        plan = group.plan
        if plan.update is not HostUpdate.PROCESSOR:
            return
        assert plan.grad is not None
        host = self.tiers[Tier.HOST]
        numel, dtype = plan.layout.shard_numel, torch_dtype(plan.grad.dtype)
        first = group.returning is None
        if not has_host_gradients(plan):
            group.landed = group.grad
        elif group.landed is None or group.landed.dtype != dtype:
            if not first:  # a plan that begins to accumulate in mid-run
                host.reserve(numel * dtype.itemsize)
            group.landed = values_of(host.allocate(numel, dtype))
        if first:  # else it may share the gradients' buffer, and keeps it when they are accumulated
            if plan.param.off_device:
                return
            own = has_host_parameters(plan)
            returned = torch_dtype(plan.param.dtype)
            group.returning = values_of(host.allocate(numel, returned)) if own else group.grad

    def _place_gathered(self, unit: Unit, slot: int | None) -> None:
        offset = 0
        for group in unit.groups:
            if slot is not None:
                nbytes = group.plan.gathered_nbytes
                dtype = torch_dtype(group.plan.param.dtype)
                group.whole = self.gather_slots[slot][offset : offset + nbytes].view(dtype)
                offset += nbytes
            peers = self._shared is not None and slot is not None and group.plan.is_gathered
            own = group.plan.layout.shard_range(group.rank)
            group.in_shard = frozenset(group.plan.layout.within(*own) if peers else ())
            group.place_views()
            resident = group.plan.param.residency is Residency.RESIDENT
            for index, parameter in enumerate(group.parameters):
                if parameter.is_meta:
                    continue
                if resident:
                    group.show_one(index)
                else:
                    group.hide_one(index)
        unit.rests_whole = slot is None
        unit.state = UnitState.GATHERED if slot is None else UnitState.RESTING

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

    def _place_sums(self, unit: Unit, slot: int | None) -> None:
        offset = 0
        for group in unit.trainable:
            group.sums = None
            if slot is not None and group.plan.grad is not None and group.plan.grad.divided:
                dtype = torch_dtype(local_dtype(group.plan, accumulate=False))
                nbytes = group.plan.layout.numel * dtype.itemsize
                group.sums = self.sum_slots[slot][offset : offset + nbytes].view(dtype)
                offset += nbytes
