"""The tensors of one flat group on a rank, and what each parameter is just now.

    in use    the parameter is a view into `whole` (or of `shard`, where it lies within), under its own class
    at rest   it holds no values, and refuses to be read (see sharding.resting)
    beside    as in use, in extra memory beside the slot (`allocate_beside`), for reads outside of its unit's forward
    opened    a GatheredParameters has given it memory; this class does not change it meanwhile

storage.py allocates the tensors and explains their names. Rejected: parameters that always stay views of the slot. They
would show the values of another unit as soon as the slot is reused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from zeroshard.engine.memory.guard import ShardedGradient, consumed_gradient_of, sharded_gradient
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.groups import GroupPlan
from zeroshard.plan.placement import Residency
from zeroshard.sharding.resting import Resting, is_resting, rest, resting_class, show_values, unguarded
from zeroshard.tiers import Row


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
    holders: Sequence[torch.Tensor]
    """The tensor that has the memory of each parameter: itself, or the local tensor of a DTensor (dtensor_group)."""
    counts: bool = True
    """Whether this rank counts the group in sums over all ranks: of ranks that hold the same part the first does."""
    on_earlier_stage: bool = False
    """Whether an earlier pipeline stage holds the same parameters, saves them and counts them in sums over stages."""
    row: Row | None = None
    """The resting place of a shard that does not lie in place; `shard` then has its size and dtype but no memory."""
    master: Row | None = None
    grad: torch.Tensor | None = None
    wire: torch.Tensor | None = None
    staging: torch.Tensor | None = None
    landed: torch.Tensor | None = None
    returning: torch.Tensor | None = None
    local: torch.Tensor | None = None
    """Whole local gradients of sharded gradients; only there once a backward ran under no_sync."""
    sums: torch.Tensor | None = None
    """The same where micro-batches pass the unit in turn, in a slot; None where the plan has none."""
    second: torch.Tensor | None = None
    """This rank's part of the second copy of the parameters; of those that rest whole, a part of `whole`."""
    errors: list[torch.Tensor | None] = field(default_factory=list)
    """Per hop of a quantized reduce, the rounding errors that this rank adds next time; None if they are dropped."""
    in_shard: frozenset[int] = frozenset()
    """Numbers of the parameters that are used directly in `shard`; no gather copies them into `whole`."""
    read_local: Callable[[int], torch.Tensor | None] | None = None
    """Returns a parameter's whole local gradient while it may be read, for its placeholder; see memory.guard."""
    opened: set[int] = field(default_factory=set)
    """Numbers of the parameters that a GatheredParameters holds whole, in memory of its own."""
    _beside: list[torch.Tensor] | None = None
    _addresses: list[int] = field(default_factory=list)
    _strides: list[tuple[int, ...]] = field(default_factory=list)
    _placeholders: list[torch.Tensor] = field(default_factory=list)

    @property
    def counted(self) -> bool:
        """Whether this rank counts the group in sums, and saves its part of it."""
        return self.counts and not self.on_earlier_stage

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters as the model sees them."""
        return torch_dtype(self.plan.shown_dtype)

    @property
    def device(self) -> torch.device:
        """Where the group computes."""
        return self.whole.device

    @property
    def copied(self) -> list[tuple[int, int]]:
        """The elements of the shard that a gather copies into `whole`: parameters that cross the shard's border."""
        pieces = self.plan.layout.pieces(*self.plan.layout.shard_range(self.rank))
        return [(low, high) for index, low, high in pieces if index not in self.in_shard]

    @property
    def wire_part(self) -> torch.Tensor:
        """The part of `wire` that this rank sums for its subgroup."""
        assert self.wire is not None
        start, end = self.plan.second_range(self.rank)
        return self.wire[start:end]

    def place_views(self) -> None:
        """Make the views, after `whole`, `shard` and `in_shard` have been set."""
        self.views = [self._in(self.whole, index) for index in range(len(self.parameters))]
        start, _ = self.plan.layout.shard_range(self.rank)
        for index in self.in_shard:
            segment = self.plan.layout.segments[index]
            self.views[index] = self.shard[segment.offset - start : segment.end - start].view(segment.shape)
        self.note_views()
        self._placeholders = []

    def note_views(self) -> None:
        """Note where the views lie, by which `replaced` tells other data; called again when their memory has moved."""
        self._addresses = [view.data_ptr() for view in self.views]
        self._strides = [view.stride() for view in self.views]

    def show(self) -> None:
        """Give the parameters their values; those that a GatheredParameters holds keep what it gave them."""
        values = self.views if self._beside is None else self._beside
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

    def values(self, *, beside: bool) -> list[torch.Tensor]:
        """The whole parameters in the unit's slot, or with `beside` in the extra memory, if there is any."""
        return self.views if not beside or self._beside is None else self._beside

    def hide_one(self, index: int) -> None:
        """Let one parameter rest, even if a GatheredParameters holds it."""
        rest(self.parameters[index], self.records[index], self.empties[index])

    def show_one(self, index: int) -> None:
        """Give one parameter its value, even if a GatheredParameters holds it."""
        show_values(self.parameters[index], (self.views if self._beside is None else self._beside)[index])

    def allocate_beside(self) -> torch.Tensor:
        """Allocate extra memory for the whole group beside its slot; `show` gives the parameters their part of it.

        Returns what a gather has to write: `layout.numel` elements, like `whole`.
        """
        whole = torch.empty_like(self.whole)
        self._beside = [self._in(whole, index) for index in range(len(self.parameters))]
        return whole

    def free_beside(self) -> None:
        """Drop the extra memory; `show` or `hide` has to follow."""
        self._beside = None

    def not_resting(self) -> int | None:
        """The first parameter that has values though the others rest; None if all rest."""
        return next(
            (
                index
                for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True))
                if not is_resting(parameter) and view.numel()
            ),
            None,
        )

    def replaced(self, *, also_opened: bool = False) -> int | None:
        """The first parameter in use whose data is not what `show` gave it; None if all are.

        Args:
            also_opened: look at those too that a GatheredParameters holds.
        """
        addresses = list(map(torch.Tensor.data_ptr, self.holders))
        strides = list(map(torch.Tensor.stride, self.holders))
        if self._beside is not None or (addresses == self._addresses and strides == self._strides):
            return None
        for index in range(len(self.holders)):
            same = addresses[index] == self._addresses[index] and strides[index] == self._strides[index]
            if not same and (also_opened or index not in self.opened):
                return index
        return None

    def _in(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        segment = self.plan.layout.segments[index]
        return whole[segment.offset : segment.end].view(segment.shape)

    def placeholders(self) -> list[torch.Tensor]:
        """The tensors that `parameter.grad` holds while the gradients are in the engine's buffers."""
        if not self._placeholders:
            # On the slot, not on the shard: whatever writes past the guard must harm nothing.
            with unguarded():
                self._placeholders = [self._placeholder(index) for index in range(len(self.parameters))]
            for index, placeholder in enumerate(self._placeholders):
                if isinstance(placeholder, ShardedGradient):
                    placeholder.of = self.plan.layout.segments[index].name
                plain = self.holders[index] is self.parameters[index]  # a DTensor's gradient is in parts
                if plain and self.read_local is not None and isinstance(placeholder, ShardedGradient):
                    placeholder.local = partial(self.read_local, index)
        return self._placeholders

    def _placeholder(self, index: int) -> torch.Tensor:
        return sharded_gradient(self.parameters[index], self._in(self.whole, index))

    def consumed(self) -> torch.Tensor:
        """What a step leaves of the first parameter's gradient; it holds no memory of a slot."""
        with unguarded():
            return consumed_gradient_of(self.empties[0].detach())

    def find_holders(self) -> None:
        """Find the holders; called when the parameters have got the group's dtype and device."""

    def gradients(self) -> list[torch.Tensor | None]:
        """What autograd left on each parameter, in the shape of its segment."""
        return [parameter.grad for parameter in self.parameters]

    def take_grad(self) -> None:
        """Allocate the reduced gradients, if they exist only between backward and step."""
        if self.grad is None:
            assert self.plan.grad is not None
            numel, dtype = self.plan.numel_per_rank(self.plan.grad), torch_dtype(self.plan.grad.dtype)
            self.grad = torch.empty(numel, dtype=dtype, device=self.device)

    def drop_grad(self) -> None:
        """Free the reduced gradients after the step, if they exist only between backward and step."""
        if self.plan.grad is not None and self.plan.grad.residency is Residency.AROUND_USE:
            self.grad = None
