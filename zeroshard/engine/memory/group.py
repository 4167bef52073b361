"""The tensors of one flat group on a rank, and what each parameter is just now.

    in use    the parameter is a view into `whole` (or of `shard`, where it lies within), under its own class
    at rest   it holds no values, and guards against being read (see sharding.resting)
    held      as in use, in memory beside the slot (`take_apart`): something reads it outside of its unit's forward
    opened    a GatheredParameters has given it memory; nothing here touches it meanwhile

What the names of the tensors mean stands in storage, which allocates them. Rejected: parameters that stay views of the
slot for good. They would show another unit's values as soon as the slot goes to its next owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from zeroshard.engine.memory.guard import sharded_gradient
from zeroshard.optim.split import join, split
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.groups import GroupPlan
from zeroshard.plan.placement import Residency
from zeroshard.sharding.layout import Segment
from zeroshard.sharding.resting import Resting, rest, resting_class, unguarded, wake
from zeroshard.tiers import Row, loaded, store


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
    records: list[Resting]
    classes: list[type[nn.Parameter]]
    master: Row | None = None
    grad: torch.Tensor | None = None
    wire: torch.Tensor | None = None
    staging: torch.Tensor | None = None
    landed: torch.Tensor | None = None
    returning: torch.Tensor | None = None
    local: torch.Tensor | None = None
    """Whole local gradients of sharded gradients; only there once a backward ran under no_sync."""
    in_shard: frozenset[int] = frozenset()
    """Numbers of the parameters that are used where they lie in `shard`; no gather puts them into `whole`."""
    opened: set[int] = field(default_factory=set)
    """Numbers of the parameters that a GatheredParameters holds whole, in memory of its own."""
    _apart: list[torch.Tensor] | None = None
    _addresses: list[int] = field(default_factory=list)
    _stand_ins: list[torch.Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where the group computes."""
        return self.whole.device

    @property
    def update_range(self) -> tuple[int, int]:
        """The elements that this rank's optimizer step updates."""
        if not self.plan.update_axes:
            return 0, self.plan.layout.numel
        return self.plan.layout.shard_range(self.rank)

    @property
    def update_param(self) -> torch.Tensor:
        """The compute-dtype parameters that this rank's optimizer step writes."""
        return self.whole if not self.plan.update_axes else self.shard

    @property
    def update_master(self) -> torch.Tensor:
        """What the optimizer step keeps beside (or as) the parameters: float32, or the remainder of split masters.

        Of master weights that do not lie in place it has the size and dtype alone, on the meta device.
        """
        if self.master is None:
            return self.update_param
        values = self.master.values
        return torch.empty(self.master.numel, dtype=self.master.dtype, device="meta") if values is None else values

    @property
    def split(self) -> bool:
        """Whether master weights are the parameters and a 16-bit remainder."""
        return self.master is not None and self.master.dtype == torch.int16

    def master_values(self) -> torch.Tensor:
        """The parameters that this rank updates, in float32 where there are master weights; on the device."""
        if self.master is None:
            return self.update_param.to(self.device)
        master = loaded(self.master, slice(None)).to(self.device)
        return join(self.update_param.to(self.device), master) if self.split else master

    @property
    def own_grad(self) -> torch.Tensor:
        """This rank's part of the reduced gradients."""
        assert self.grad is not None
        assert self.plan.grad is not None
        if self.plan.grad.divided:
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
        self.views = [self._in(self.whole, index) for index in range(len(self.parameters))]
        start, _ = self.plan.layout.shard_range(self.rank)
        for index in self.in_shard:
            segment = self.plan.layout.segments[index]
            self.views[index] = self.shard[segment.offset - start : segment.end - start].view(segment.shape)
        self._addresses = [view.data_ptr() for view in self.views]
        self._stand_ins = []

    def show(self) -> None:
        """Give the parameters their values; those that a GatheredParameters holds keep what it gave them."""
        values = self.views if self._apart is None else self._apart
        for index, (parameter, own, value) in enumerate(zip(self.parameters, self.classes, values, strict=True)):
            if index not in self.opened:
                parameter.__class__ = own
                parameter.data = value

    def hide(self) -> None:
        """Let the parameters rest, but for those that a GatheredParameters holds."""
        for index, (parameter, own, empty) in enumerate(zip(self.parameters, self.classes, self.empties, strict=True)):
            if index not in self.opened:
                parameter.__class__ = own
                parameter.data = empty
                parameter.__class__ = resting_class(own)  # pyright: ignore[reportAttributeAccessIssue]

    def values(self, *, held: bool) -> list[torch.Tensor]:
        """The whole parameters in the unit's slot, or in the memory beside it."""
        return self.views if not held or self._apart is None else self._apart

    def hide_one(self, index: int) -> None:
        """Let one parameter rest, whoever holds it."""
        rest(self.parameters[index], self.records[index], self.empties[index])

    def show_one(self, index: int) -> None:
        """Give one parameter its value, whoever holds it."""
        wake(self.parameters[index], (self.views if self._apart is None else self._apart)[index])

    def take_apart(self) -> torch.Tensor:
        """Memory for the whole group beside its slot; `show` gives the parameters their part of it."""
        whole = torch.empty_like(self.whole)
        self._apart = [self._in(whole, index) for index in range(len(self.parameters))]
        return whole

    def give_apart_back(self) -> None:
        """Give that memory up; `show` or `hide` is to follow."""
        self._apart = None

    def replaced(self) -> int | None:
        """The first parameter in use whose data is not what `show` gave it; None if all are."""
        if self._apart is not None or list(map(torch.Tensor.data_ptr, self.parameters)) == self._addresses:
            return None
        for index, (parameter, address) in enumerate(zip(self.parameters, self._addresses, strict=True)):
            if index not in self.opened and parameter.data_ptr() != address:
                return index
        return None

    def _in(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        segment = self.plan.layout.segments[index]
        return whole[segment.offset : segment.end].view(segment.shape)

    def stand_ins(self) -> list[torch.Tensor]:
        """What each parameter's `grad` is while its gradients are in the engine's buffers."""
        if not self._stand_ins:
            # On the slot, not on the shard: what autograd adds to a stand-in is refused, and must harm nothing.
            with unguarded():
                self._stand_ins = [
                    sharded_gradient(parameter, self._in(self.whole, index))
                    for index, parameter in enumerate(self.parameters)
                ]
        return self._stand_ins

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
        return self.grad if not self.plan.update_axes else self.own_grad

    @property
    def held_range(self) -> tuple[int, int]:
        """The elements whose truth this rank holds: those that it updates, or of a frozen group its shard."""
        if not self.plan.trainable and self.plan.param.divided:
            return self.plan.layout.shard_range(self.rank)
        return self.update_range if self.plan.trainable else (0, self.plan.layout.numel)

    @property
    def held_param(self) -> torch.Tensor:
        """The compute-dtype parameters of `held_range`."""
        whole = self.held_range == (0, self.plan.layout.numel) and not self.plan.param.divided
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
            self._write_master(own, flat[of_value].to(torch.promote_types(flat.dtype, torch.float32)))
        self._write_param(segment, flat)

    def _write_master(self, own: slice, values: torch.Tensor) -> None:
        assert self.master is not None
        store(self.master, own, split(values.to(self.device))[1] if self.split else values)

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
            kept = torch.where(current == new, old, new.to(old.dtype))
            self._write_master(own, kept)
        self._write_param(segment, flat)

    def follow(self, index: int, value: torch.Tensor) -> None:
        """Let master weights follow a whole parameter that was changed in place; unchanged elements keep precision."""
        own, of_value = self._overlap(self.plan.layout.segments[index], *self.update_range)
        old, new = self.master_values()[own], value.reshape(-1)[of_value]
        self._write_master(own, torch.where(old.to(new.dtype) == new, old, new.to(old.dtype)))

    def _write_param(self, segment: Segment, flat: torch.Tensor) -> None:
        if self.split and flat.dtype != self.whole.dtype:
            flat = split(flat.float())[0]  # rounded as its master weights are
        if not self.plan.param.divided:
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
