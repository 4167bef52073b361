"""Gradients: collects what autograd left on the parameters, reduces it, and keeps it until the step.

    parameter.grad --collect--> wire slot --reduce-scatter--> grad                 (sharded, one micro-batch)
    parameter.grad --collect--> wire slot --reduce-scatter--> staging --add--> grad (sharded, accumulated)
    parameter.grad --collect--> whole grad --reduce-scatter in place               (whole, wire dtype)
    parameter.grad --copies to peers--> inboxes --sum--> grad                      (sharded, see peer_reduce)
    parameter.grad --collect--> wire slot --reduce-scatter--> staging --squares, copy--> grad   (resting on the host)
    parameter.grad --collect--> whole grad --cast--> wire slot --> staging --> grad (whole, another dtype)

The layout and the reduce are the same in every stage, so the sums are too. Where every rank updates everything
(stage 0) an all-gather of the reduced parts follows. Owns the memory of the reduce slots:

    write after read    compute waits for the slot's `free` event before it collects into it again
    read after write    the reduce stream waits for the event recorded after the collect
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.peers import Peers
from zeroshard.engine.core.inspection import refuse_leftover
from zeroshard.engine.core.peer_reduce import PeerReduce
from zeroshard.engine.core.pending_updates import PendingUpdates
from zeroshard.engine.core.streams import Event, Stream, Streams
from zeroshard.engine.memory.group import Group, Unit
from zeroshard.engine.memory.storage import Storage
from zeroshard.errors import PlanError, UsageError
from zeroshard.optim.kernels.norm import SquaredNorm
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.plan import Plan
from zeroshard.sharding.resting import unguarded


@dataclass(frozen=True)
class _Cuts:
    """A gradient buffer as one view per parameter, and what lies between them."""

    views: list[torch.Tensor]
    gaps: list[torch.Tensor]


@dataclass(frozen=True)
class _Squares:
    """The sum of squares of gradients that go to host memory, made while they are on the device."""

    norm: SquaredNorm
    total: torch.Tensor


class Gradients:
    """The way of gradients from autograd to the step.

    Args:
        reduces: the reduce communicator of each mesh axis.
        log: what this rank issues, in the order of the lists (a queue may start it later).
        peers: the peer memory in which the reduce slots are, where ranks copy to each other instead.
        updates: updates that are under way beside compute, and read gradients there.
    """

    def __init__(
        self,
        plan: Plan,
        storage: Storage,
        streams: Streams,
        reduces: dict[str, Collectives],
        log: OperationLog,
        peers: Peers | None = None,
        updates: PendingUpdates | None = None,
    ) -> None:
        self._updates = PendingUpdates() if updates is None else updates
        self._peers = None if peers is None else PeerReduce(peers, streams, log)
        self._storage = storage
        self._log = log
        self._streams = streams
        self._reduces = reduces
        self.collected = 0
        """Counts units whose gradients came: what was measured at another count is out of date."""
        self.cleared = 0
        """Counts how often all gradients went: what was asked of those before does not hold for those after."""
        self.square_into(None, ())
        self._fired = [[[False] * len(group.parameters) for group in unit.trainable] for unit in storage.units]
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Start anew under a plan with other slots; nothing may be in flight."""
        self._policy = plan.policy
        self._slots = plan.reduce_slots.of_unit
        self._free: dict[int, Event] = {}
        # Made here, on compute, which every reduce waits for: later their first zeros could come after the first sum.
        self._squares = {
            id(group): _squares_of(group)
            for unit in self._storage.units
            for group in unit.trainable
            if group.plan.grad_on_host and group.staging is not None
        }
        self._cuts: dict[tuple[int, int], _Cuts] = {}
        self.clear()
        if self._peers is not None:
            self._peers.adopt()

    def clear(self) -> None:
        """The gradients were consumed or dropped; the next backward starts from nothing."""
        # Write after read: what was dropped (zero_grad, an exception) may still be on its way through a reduce, and the
        # next backward collects into the same memory.
        self._streams.wait(Stream.COMPUTE, self._streams.record(Stream.REDUCE, "all"))
        if self._peers is not None:
            self._peers.let_go()
        self.cleared += 1
        count = len(self._storage.units)
        self._local = [False] * count  # whole local gradients wait for a reduce
        self._reduced = [False] * count  # reduced gradients rest in grad
        self._squared: set[int] = set()
        for unit in self._fired:
            for group in unit:
                group[:] = [False] * len(group)
        for unit in self._storage.units:
            for group in unit.trainable:
                group.drop_grad()

    def moved(self) -> None:
        """Buffers have other addresses than before."""
        self._cuts.clear()

    @property
    def last_slot(self) -> int | None:
        """The inbox that was written last, where ranks copy to each other."""
        return None if self._peers is None else self._peers.last_slot

    @property
    def present(self) -> bool:
        """Whether any backward has run since the gradients were last cleared."""
        return any(self._local) or any(self._reduced)

    def pending(self, unit: Unit) -> bool:
        """Whether whole local gradients of the unit wait for a reduce."""
        return self._local[unit.index]

    def reduced(self, unit: Unit) -> bool:
        """Whether reduced gradients of the unit rest."""
        return self._reduced[unit.index]

    def local(self, group: Group) -> torch.Tensor:
        """The whole local gradients of a group that are pending."""
        return self._whole(group)

    def fired(self, unit: Unit) -> list[list[bool]]:
        """Per trainable group and parameter: whether it got a gradient on this rank."""
        return self._fired[unit.index]

    def silent(self) -> list[int]:
        """Per unit, how many parameters got no gradient on this rank; 0 throughout where there was no backward."""
        count = self.present
        return [sum(flags.count(False) for flags in unit) if count else 0 for unit in self._fired]

    def notice_dropped(self) -> None:
        """Forget gradients that the user dropped through the model: model.zero_grad() removes all stand-ins."""
        members = (p for unit in self._storage.units for group in unit.trainable for p in group.parameters)
        with unguarded():
            dropped = self.present and all(parameter.grad is None for parameter in members)
        if dropped:
            self.clear()

    def discard_leftovers(self) -> None:
        """Before a backward: parameters carry no gradient, so that autograd hands new ones over without adding."""
        with unguarded():
            for unit in self._storage.units:
                for group in unit.trainable:
                    for index, parameter in enumerate(group.parameters):
                        refuse_leftover(group, index, parameter)
                        parameter.grad = None

    def show_collected(self) -> None:
        """After a backward: all gradients are in the engine's buffers, and parameters get stand-ins for them."""
        with unguarded():
            for unit in self._storage.units:
                for group in unit.trainable:
                    for index, (parameter, stand_in) in enumerate(
                        zip(group.parameters, group.stand_ins(), strict=True)
                    ):
                        assert parameter.grad is None, group.plan.layout.segments[index].name
                        parameter.grad = stand_in

    def collect_late(self, group: Group, fired: list[bool], factor: float) -> None:
        """Add gradients that came late, times `factor`, to whole local ones that wait for a reduce."""
        self._collect(group, fired, self._whole(group), fresh=False, factor=factor)

    def changed(self, group: Group) -> None:
        """Gradients were changed where they rest: squares of what was there before count no more."""
        self._squared.discard(id(group))
        self.square_again(group)

    def finish_unit(self, unit: Unit, factor: float, *, reduce_whole: bool, reduce_sharded: bool) -> None:
        """Collect a unit whose gradients are complete, times `factor`; reduce it where its placement's flag says so."""
        self.collected += 1
        self._wait_for_update(unit)
        for group, fired in zip(unit.trainable, self._fired[unit.index], strict=True):
            assert group.plan.grad is not None
            sharded = group.plan.grad.axis is not None
            reduce = reduce_sharded if sharded else reduce_whole
            self._refuse_unplanned(unit)
            if sharded and reduce and not self._local[unit.index] and self._peers is not None:
                self._reduce_by_peers(self._peers, unit, group, self._take(group, fired, factor))
                self._square(unit, group)
            elif sharded and reduce and not self._local[unit.index]:
                self._wait_for_slot(unit)
                self._collect(group, fired, self._wire(group), fresh=True, factor=factor)
                self._reduce_slot(unit, group)
                self._square(unit, group)
            else:
                if self._peers is not None:
                    # Write after read: whole local gradients may still be sent from where they are about to be written.
                    self._peers.let_go()
                fresh = not self._local[unit.index]
                self._collect(group, fired, self._whole(group), fresh=fresh, factor=factor)
                if reduce:
                    self._reduce_whole(unit, group)
        self._mark(unit, reduce_whole=reduce_whole, reduce_sharded=reduce_sharded)

    def square_into(self, norm: SquaredNorm | None, groups: Sequence[Group]) -> None:
        """Square each of `groups` when it has been reduced, as the tensor of `norm` of the same number; None: don't."""
        self._norm = norm
        self._number = {id(group): number for number, group in enumerate(groups)}
        self._squared = set()

    def square_rest(self, groups: Sequence[Group]) -> None:
        """Square on compute what was not squared when it was reduced."""
        assert self._norm is not None
        for number, group in enumerate(groups):
            if id(group) not in self._squared:
                self._norm.square(number, group.own_grad)

    def _square(self, unit: Unit, group: Group) -> None:
        """Square a group whose reduce was the last one before the step."""
        norm, number = self._norm, self._number.get(id(group))
        if norm is None or number is None or self._policy.accumulate or id(group) in self._squared:
            return
        gradient = group.own_grad
        self._streams.follow(Stream.REDUCE, lambda: norm.square(number, gradient), (("grad", unit.index),))
        self._squared.add(id(group))

    def _squares_beside(self, unit: Unit, group: Group) -> torch.Tensor | None:
        """Where the kernel that sums a group's gradients puts their squares; None where it sees no final sums."""
        norm, number = self._norm, self._number.get(id(group))
        if norm is None or number is None or self._policy.accumulate or unit.plan.axis == "shard":
            return None
        self._squared.add(id(group))
        return norm.partial(number)

    def squares(self, group: Group) -> torch.Tensor:
        """Float64 scalar on the device: the sum of squares of gradients that have gone to host memory since."""
        return self._squares[id(group)].total

    def square_again(self, group: Group) -> None:
        """A group's gradients were changed where they rest, with no reduce in flight: square those in host memory."""
        squares = self._squares.get(id(group))
        if squares is not None:
            squares.norm.square(0, group.own_grad.to(squares.total.device))
            squares.norm.into(squares.total)

    def first_bad(self, group: Group) -> torch.Tensor:
        """Int64 scalar on the device: the first tile of such gradients that is not finite; see SquaredNorm."""
        return self._squares[id(group)].norm.first_bad

    def first_in_tile(self, group: Group, tile: int) -> int:
        """The first element of a tile of such gradients, in this rank's part."""
        return self._squares[id(group)].norm.place_of(tile)[1]

    def _wait_for_update(self, unit: Unit) -> None:
        event = self._updates.read(unit.index)
        if event is not None:
            # Write after read: gradients belong to the update that reads them beside compute until it has. The reduce
            # that writes them waits for compute.
            self._streams.wait(Stream.COMPUTE, event)

    def _put_down(self, unit: Unit, group: Group, slot: int | None) -> None:
        """Square reduced gradients while they are on the device, and copy them to host memory."""
        staging, grad, squares = group.staging, group.grad, self._squares[id(group)]
        assert staging is not None
        assert grad is not None
        buffers = ((("wire", slot),), (("grad", unit.index),))
        self._streams.follow(Stream.REDUCE, lambda: squares.norm.square(0, staging), *buffers)
        self._streams.follow(Stream.REDUCE, lambda: squares.norm.into(squares.total), *buffers)
        self._streams.follow(Stream.REDUCE, lambda: grad.copy_(staging, non_blocking=True), *buffers)

    def reduce_pending(self, unit: Unit) -> None:
        """Reduce whole local gradients that no backward reduced (no_sync, or accumulation without a boundary)."""
        if not self._local[unit.index]:
            return
        for group in unit.trainable:
            self._reduce_whole(unit, group)
        self._local[unit.index], self._reduced[unit.index] = False, True

    def _mark(self, unit: Unit, *, reduce_whole: bool, reduce_sharded: bool) -> None:
        sharded = any(group.plan.grad is not None and group.plan.grad.axis is not None for group in unit.trainable)
        reduced = reduce_sharded if sharded else reduce_whole
        self._local[unit.index] = not reduced
        self._reduced[unit.index] = self._reduced[unit.index] or reduced

    def _refuse_unplanned(self, unit: Unit) -> None:
        sharded = all(group.plan.grad is not None and group.plan.grad.axis is not None for group in unit.trainable)
        if self._reduced[unit.index] and not (sharded and self._policy.accumulate):
            what = "has been reduced already" if self._policy.accumulate else "has no accumulator in the plan"
            raise UsageError(
                f"a second backward before the step: the gradient of unit {unit.label!r} {what}. "
                "Say shard(..., accumulate=True), or give the engine gradient_accumulation_steps; where their number "
                "is not known before, call engine.set_gradient_accumulation_boundary(False) ahead of all but the last, "
                "or set managed_gradient_accumulation to false. Call step() or zero_grad() after the last"
            )

    def _wire(self, group: Group) -> torch.Tensor:
        assert group.wire is not None
        return group.wire

    def _whole(self, group: Group) -> torch.Tensor:
        """Where whole local gradients are kept: the resting gradient, or a buffer taken when no_sync first needs it."""
        assert group.plan.grad is not None
        if group.plan.grad.axis is None:
            assert group.grad is not None
            return group.grad
        if group.local is None:
            # Never narrower than the wire, so that no_sync is no less exact than reducing each micro-batch.
            kept, wire = torch_dtype(group.plan.grad.dtype), torch_dtype(group.plan.wire)
            dtype = kept if kept.itemsize >= wire.itemsize else wire
            if not self._policy.accumulate:  # then the plan's gradients are not meant to be added to
                dtype = torch.promote_types(dtype, torch.float32)
            group.local = torch.zeros(group.plan.layout.numel, dtype=dtype, device=group.device)
        return group.local

    def _wait_for_slot(self, unit: Unit) -> None:
        slot = self._slots[unit.index]
        if slot is not None and slot in self._free:
            # Write after read: the slot belongs to the reduce of its last unit until that has finished.
            self._streams.wait(Stream.COMPUTE, self._free[slot])

    def _collect(self, group: Group, fired: list[bool], target: torch.Tensor, *, fresh: bool, factor: float) -> None:
        """Move the gradients of a group, times `factor`, into `target`: over what is there when fresh, else added."""
        cuts = self._cuts_of(group, target)
        views, grads, empty = [], [], []
        for index, (view, parameter) in enumerate(zip(cuts.views, group.parameters, strict=True)):
            if parameter.grad is None:
                empty.append(view)
                continue
            views.append(view)
            grads.append(_dense(parameter, group, index))
            parameter.grad = None
            fired[index] = True
        if fresh:
            empty += cuts.gaps
            if empty:
                torch._foreach_zero_(empty)  # a slot is dirty: what got no gradient must not keep another unit's
            if grads:
                torch._foreach_copy_(views, grads)
                if factor != 1.0:
                    torch._foreach_mul_(views, factor)
        elif grads:
            torch._foreach_add_(views, grads, alpha=factor)

    def _take(self, group: Group, fired: list[bool], factor: float) -> list[torch.Tensor | None]:
        """The gradients of a group times `factor`, taken off their parameters; None where there is none."""
        taken: list[torch.Tensor | None] = []
        for index, parameter in enumerate(group.parameters):
            grad = None
            if parameter.grad is not None:
                grad = _dense(parameter, group, index).contiguous()
                grad = grad if factor == 1.0 else grad * factor
                parameter.grad = None
                fired[index] = True
            taken.append(grad)
        return taken

    def _reduce_by_peers(
        self, peers: PeerReduce, unit: Unit, group: Group, sources: Sequence[torch.Tensor | None]
    ) -> None:
        slot, replicated = self._slots[unit.index], unit.plan.axis == "shard" and group.staging is not None
        if not replicated and not group.plan.grad_on_host:
            grad, add = group.take_grad(), group.staging is not None and self._reduced[unit.index]
            peers.reduce(unit, group, slot, sources, grad, add=add, squares=self._squares_beside(unit, group))
            self._reduce_replicas(unit, grad)
            return
        landing, add = group.staging, self._reduced[unit.index]
        assert landing is not None
        peers.reduce(unit, group, slot, sources, landing, add=False)
        self._reduce_replicas(unit, landing)
        if group.plan.grad_on_host:
            self._put_down(unit, group, slot)
            return
        self._streams.follow(
            Stream.REDUCE,
            lambda: _land(group.own_grad, landing, add=add),
            (("wire", slot),),
            (("grad", unit.index),),
        )

    def _cuts_of(self, group: Group, target: torch.Tensor) -> _Cuts:
        """The views of a group's gradient buffer; made once, for the buffers stay where they are."""
        key = (id(group), target.data_ptr())
        found = self._cuts.get(key)
        if found is None:
            layout = group.plan.layout
            views = [target[segment.offset : segment.end].view(segment.shape) for segment in layout.segments]
            found = self._cuts[key] = _Cuts(views, [target[start:end] for start, end in layout.gaps()])
        return found

    def _reduce_slot(self, unit: Unit, group: Group) -> None:
        """Reduce what lies in the wire slot into this rank's resting gradient."""
        wire, collectives, label = self._wire(group), self._reduces[unit.plan.axis], unit.label
        self._log.record("reduce-scatter", label, wire.nbytes)
        if self._policy.predivide != 1.0:
            wire.div_(self._policy.predivide)
        slot = self._slots[unit.index]
        # Read after write: the slot belongs to compute until the collect has run.
        self._streams.touch(writes=(("wire", slot),))
        self._streams.wait(Stream.REDUCE, self._streams.record(Stream.COMPUTE, "collected"))
        landing = group.staging if group.staging is not None else group.take_grad()
        buffers = (("wire", slot), ("grad", unit.index))
        launch, follow = self._streams.launch, self._streams.follow
        launch(Stream.REDUCE, lambda: collectives.reduce_scatter(landing, wire, label), (buffers[0],), buffers)
        self._reduce_replicas(unit, landing)
        if group.plan.update_axis is None:
            launch(Stream.REDUCE, lambda: collectives.all_gather(wire, landing, label), (buffers[0],), buffers)
            grad = group.grad
            assert grad is not None
            follow(Stream.REDUCE, lambda: grad.copy_(wire), (buffers[0],), (buffers[1],))
        elif group.plan.grad_on_host:
            self._put_down(unit, group, slot)
        elif group.staging is not None:
            add = self._reduced[unit.index]
            follow(Stream.REDUCE, lambda: _land(group.own_grad, landing, add=add), (buffers[0],), (buffers[1],))
        if self._streams.poisons:
            follow(Stream.REDUCE, lambda: wire.fill_(math.nan), (), (buffers[0],))
        if slot is not None:
            self._free[slot] = self._streams.record(Stream.REDUCE, ("wire", slot))

    def _reduce_whole(self, unit: Unit, group: Group) -> None:
        """Reduce whole local gradients: through the slot, or in place where they rest in wire dtype."""
        if group.plan.needs_reduce_slot and self._peers is not None:
            cuts = self._cuts_of(group, self._whole(group))
            self._reduce_by_peers(self._peers, unit, group, list(cuts.views))
            return
        if group.plan.needs_reduce_slot:
            self._wait_for_slot(unit)
            self._wire(group).copy_(self._whole(group))
            self._reduce_slot(unit, group)
            return
        whole, own, collectives, label = self._whole(group), group.own_grad, self._reduces[unit.plan.axis], unit.label
        self._log.record("reduce-scatter", label, whole.nbytes)
        if self._policy.predivide != 1.0:
            whole.div_(self._policy.predivide)
        buffer = (("grad", unit.index),)
        self._streams.touch(writes=buffer)
        # Read after write: the gradient belongs to compute until the collect has run.
        self._streams.wait(Stream.REDUCE, self._streams.record(Stream.COMPUTE, "collected"))
        self._streams.launch(Stream.REDUCE, lambda: collectives.reduce_scatter(own, whole, label), buffer, buffer)
        self._reduce_replicas(unit, own)
        if group.plan.update_axis is None:
            self._streams.launch(Stream.REDUCE, lambda: collectives.all_gather(whole, own, label), buffer, buffer)

    def _reduce_replicas(self, unit: Unit, part: torch.Tensor) -> None:
        """Units divided within a subgroup are summed over the subgroups too."""
        if unit.plan.axis == "shard":
            replicas, label = self._reduces["replicate"], unit.label
            self._streams.launch(Stream.REDUCE, lambda: replicas.all_reduce(part, label), (), (("grad", unit.index),))


def _squares_of(group: Group) -> _Squares:
    assert group.staging is not None
    device = group.staging.device
    norm = SquaredNorm([group.own_pieces()], device)
    return _Squares(norm, torch.zeros((), dtype=torch.float64, device=device))


def _land(grad: torch.Tensor, reduced: torch.Tensor, *, add: bool) -> None:
    if add:
        grad.add_(reduced)
    else:
        grad.copy_(reduced)


def _dense(parameter: nn.Parameter, group: Group, index: int) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse:
        name = group.plan.layout.segments[index].name
        raise PlanError(f"parameter {name!r} got a sparse gradient; build its nn.Embedding with sparse=False")
    return grad
