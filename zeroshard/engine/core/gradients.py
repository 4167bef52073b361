"""Collects the gradients that autograd left on the parameters, reduces them, and keeps them until the step.

    backward    finish_unit        run the unit's legs: collect and reduce, or only collect (pending reduction)
    step        reduce_pending     reduce the gradients that no backward reduced
                clear              drop all gradients

The layout and the sums are the same in every stage. The plan says which legs a gradient passes (plan.legs), and
leg_actions executes them. This class records which parameters of each unit got a gradient; whether a unit's gradients
are local, reduced or both is the state of the unit (memory.unit).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.peers import Peers
from zeroshard.engine.core.collect import Collector
from zeroshard.engine.core.copied_gradients import CopiedGradients, has_copies
from zeroshard.engine.core.inspection import refuse_leftover
from zeroshard.engine.core.leg_actions import LegActions
from zeroshard.engine.core.leg_context import Action, BackwardArgs
from zeroshard.engine.core.peer_reduce import PeerReduce
from zeroshard.engine.core.pending_updates import PendingUpdates
from zeroshard.engine.core.squares import Squares
from zeroshard.engine.core.streams import Streams
from zeroshard.engine.core.sums import SumSlots
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.guard import ConsumedGradient
from zeroshard.engine.memory.storage import Storage
from zeroshard.engine.memory.unit import GradientState, Unit
from zeroshard.engine.memory.update_view import update_grad
from zeroshard.errors import UsageError
from zeroshard.mesh import Axes
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.legs import Buffer, GroupLegs, Stream
from zeroshard.plan.plan import Plan
from zeroshard.sharding.resting import unguarded


@dataclass(frozen=True)
class _Lists:
    """The actions for the gradients of one group; see plan.legs.GroupLegs."""

    keep: list[Action]
    pending: list[Action]
    reduce: list[Action]
    divided: bool


class Gradients:
    """All gradients of a model, from autograd to the step.

    Args:
        reduces: the reduce communicators, by mesh axes.
        log: records what this rank issues, in the order of the lists (a queue may start it later).
        peers: the peer memory that holds the reduce slots; None if ranks reduce by collectives.
        updates: pending updates, which read gradients beside compute.
        may_read_local: whether code may currently read this rank's own gradients.
    """

    def __init__(
        self,
        plan: Plan,
        storage: Storage,
        streams: Streams,
        reduces: Mapping[Axes, Collectives],
        log: OperationLog,
        peers: Peers | None = None,
        updates: PendingUpdates | None = None,
        may_read_local: Callable[[], bool] = lambda: False,
    ) -> None:
        self._updates = PendingUpdates() if updates is None else updates
        self._may_read_local = may_read_local
        self._peers = None if peers is None else PeerReduce(peers, streams, log)
        self._storage = storage
        self._log = log
        self._streams = streams
        self._reduces = reduces
        self.squares = Squares(streams)
        self.collected = 0
        """How many times a unit's gradients were collected; a norm that was taken at another count is out of date."""
        self.cleared = 0
        """How many times all gradients were dropped, so that callers can tell gradients before and after apart."""
        self._kept_consumed = False
        self._received = [[[False] * len(group.parameters) for group in unit.trainable] for unit in storage.units]
        self.copies = CopiedGradients() if has_copies(plan.mesh) else None
        """Compares gradients of parameters that all ranks of `tp` have whole; None without such an axis."""
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Start anew under a plan with other slots; nothing may be in flight."""
        self._plan = plan
        self.squares.adopt(self._storage.units, accumulate=plan.policy.accumulate)
        self._sums = SumSlots(plan.sum_slots.of_unit)
        self._collector = Collector(accumulate=plan.policy.accumulate, sums=self._sums, copies=self.copies)
        self._actions = LegActions(
            plan.reduce_slots.of_unit,
            self._collector,
            self.squares,
            self._streams,
            self._reduces,
            self._log,
            self._peers,
            plan.policy.predivide,
            self._storage.exchange,
        )
        self._bind()
        self._bind_placeholders()
        self.clear()
        if self._peers is not None:
            self._peers.adopt()

    def _bind(self) -> None:
        self._lists = [[self._lists_of(unit, group) for group in unit.trainable] for unit in self._storage.units]

    def _bind_placeholders(self) -> None:
        """Let placeholders read this rank's local gradients, by a weak reference that keeps no engine alive."""
        reference = weakref.ref(self)
        for unit in self._storage.units:
            for number, group in enumerate(unit.trainable):

                def show(index: int, unit: int = unit.index, number: int = number) -> torch.Tensor | None:
                    gradients = reference()
                    return None if gradients is None else gradients._local_gradient(unit, number, index)

                group.read_local = show

    def _local_gradient(self, unit: int, number: int, index: int) -> torch.Tensor | None:
        """One parameter's whole local gradient; None unless it lies in the local buffer and may be read."""
        if not self._may_read_local() or self._storage.units[unit].gradients is not GradientState.LOCAL:
            return None
        group = self._storage.units[unit].trainable[number]
        if group.plan.grad_off_device:
            self._streams.drain()
            self._streams.wait_on_host()
        segment = group.plan.layout.segments[index]
        return self.local(group)[segment.offset : segment.end].view(segment.shape)

    def _lists_of(self, unit: Unit, group: Group) -> _Lists:
        legs, bind = self._legs(unit, group), self._actions.bind
        keep, pending, reduce = (bind(unit, group, some) for some in (legs.keep, legs.pending, legs.reduce))
        return _Lists(keep, pending, reduce, legs.divided)

    def _legs(self, unit: Unit, group: Group) -> GroupLegs:
        return self._plan.legs[unit.index][unit.groups.index(group)]

    def clear(self) -> None:
        """Drop all gradients: the step has used them, or they were discarded."""
        # Write after read: discarded gradients (zero_grad, an exception) may still be in a reduce, and the next
        # backward collects into the same memory.
        self._streams.wait(Stream.COMPUTE, self._streams.record(Stream.REDUCE, "all"))
        if self._peers is not None:
            self._peers.release_sent()
        self.cleared += 1
        self._kept_consumed = False
        self.squares.clear()
        if self._sums.clear():
            self._collector.forget_addresses()
        for unit in self._received:
            for group in unit:
                group[:] = [False] * len(group)
        for unit in self._storage.units:
            unit.gradients = GradientState.NONE
            for group in unit.trainable:
                group.drop_grad()

    def forget_errors(self) -> None:
        """Set the rounding errors of quantized gradients to zero, since they belong to another training run."""
        for unit in self._storage.units:
            for group in unit.trainable:
                for error in group.errors:
                    if error is not None:
                        error.zero_()

    def forget_addresses(self) -> None:
        """Bind all actions again: the buffers have moved to other addresses."""
        self._collector.forget_addresses()
        self._bind()

    @property
    def last_slot(self) -> int | None:
        """The reduce slot that was used last, if ranks copy to each other; else None."""
        return None if self._peers is None else self._peers.last_slot

    @property
    def present(self) -> bool:
        """Whether any backward has run since the gradients were last cleared."""
        return any(unit.gradients is not GradientState.NONE for unit in self._storage.units)

    def local(self, group: Group) -> torch.Tensor:
        """The whole local gradients of a group that are pending."""
        return self._collector.local(group)

    def received(self, unit: Unit) -> list[list[bool]]:
        """Per trainable group and parameter: whether it got a gradient on this rank."""
        return self._received[unit.index]

    def missing_counts(self) -> list[int]:
        """Per unit, how many parameters got no gradient on this rank; all 0 if there was no backward."""
        count = self.present
        return [sum(flags.count(False) for flags in unit) if count else 0 for unit in self._received]

    def notice_dropped(self) -> None:
        """Clear all gradients if the user dropped them: model.zero_grad() removes all placeholders."""
        members = (p for unit in self._storage.units for group in unit.trainable for p in group.parameters)
        with unguarded():
            dropped = self.present and all(parameter.grad is None for parameter in members)
        if dropped:
            self.clear()

    def discard_leftovers(self) -> None:
        """Before a backward: remove `parameter.grad`, so that autograd sets new gradients without adding."""
        self._kept_consumed = self.kept_consumed
        present = self.present
        with unguarded():
            for unit in self._storage.units:
                for group in unit.trainable:
                    for index, parameter in enumerate(group.parameters):
                        refuse_leftover(group, index, parameter, present=present)
                        parameter.grad = None

    def leave_consumed(self) -> None:
        """After a step: leave a placeholder on one parameter, which shows whether the script drops its gradients."""
        group = self._first_trainable()
        assert group is not None
        with unguarded():
            group.parameters[0].grad = group.consumed()

    @property
    def kept_consumed(self) -> bool:
        """Whether the script has kept the gradients that the last step consumed: neither zeroed nor set to None."""
        group = self._first_trainable()
        if self._kept_consumed or group is None:
            return self._kept_consumed
        with unguarded():
            gradient = group.parameters[0].grad
        return isinstance(gradient, ConsumedGradient) and not gradient.dropped

    def _first_trainable(self) -> Group | None:
        return next((group for unit in self._storage.units for group in unit.trainable), None)

    def set_placeholders(self) -> None:
        """After a backward: all gradients are in the engine's buffers, and `parameter.grad` gets placeholders."""
        with unguarded():
            for unit in self._storage.units:
                for group in unit.trainable:
                    for index, (parameter, placeholder) in enumerate(
                        zip(group.parameters, group.placeholders(), strict=True)
                    ):
                        assert parameter.grad is None, group.plan.layout.segments[index].name
                        parameter.grad = placeholder

    def add_late(self, unit: Unit, group: Group, factor: float) -> None:
        """Add gradients that came after their unit was collected; they are reduced if the unit's gradients are.

        This is slow: compute waits for the reduce.
        """
        number = unit.trainable.index(group)
        args = BackwardArgs(self._received[unit.index][number], factor, fresh=False, add=True)
        if unit.gradients.local:
            _run(self._lists[unit.index][number].keep, args)
            return
        layout, legs = group.plan.layout, self._legs(unit, group).late
        late = torch.empty(layout.numel, dtype=torch_dtype(group.plan.wire), device=group.device)
        memory = {Buffer.LATE: late, Buffer.LATE_PART: torch.empty_like(late[: layout.shard_numel])}
        _run(self._actions.bind(unit, group, legs, memory), args)
        # Read after write: the memory belongs to the reduce until that has finished.
        self._streams.wait(Stream.COMPUTE, self._streams.record(Stream.REDUCE, "all"))
        if group.plan.grad_off_device:
            self._streams.drain()
            self._streams.wait_on_host()
        target = update_grad(group)
        target.add_(memory[legs[-1].target].to(target.device, target.dtype))
        self._streams.touch(writes=(("grad", unit.index),))
        self.squares.changed(group)

    def finish_unit(self, unit: Unit, factor: float, *, reduce_whole: bool, reduce_sharded: bool) -> None:
        """Collect the complete gradients of a unit, times `factor`, and reduce them if the flag for its kind is set.

        Args:
            reduce_whole, reduce_sharded: whether whole gradients are reduced now, and whether sharded ones are.
        """
        self.collected += 1
        self._wait_for_update(unit)
        self._refuse_unplanned(unit)
        local, add = unit.gradients.local, unit.gradients.reduced
        if not local:
            self._sums.begin(unit)
        for group, lists, received in zip(
            unit.trainable, self._lists[unit.index], self._received[unit.index], strict=True
        ):
            args = BackwardArgs(received, factor, not local, add)
            reduce = reduce_sharded if lists.divided else reduce_whole
            if reduce and not local:
                _run(lists.reduce, args)
                if lists.divided:
                    self.squares.after_reduce(unit, group)
            else:
                _run(lists.keep, args)
                if reduce:
                    _run(lists.pending, args)
                    if lists.divided:
                        self.squares.after_reduce(unit, group)
        divided = any(lists.divided for lists in self._lists[unit.index])
        if reduce_sharded if divided else reduce_whole:
            unit.gradients = GradientState.REDUCED
        else:
            unit.gradients = GradientState.BOTH if add else GradientState.LOCAL

    def reduce_pending(self, unit: Unit) -> None:
        """Reduce whole local gradients that no backward reduced (no_sync, or accumulation without a boundary)."""
        if not unit.gradients.local:
            return
        for lists, received in zip(self._lists[unit.index], self._received[unit.index], strict=True):
            _run(lists.pending, BackwardArgs(received, 1.0, fresh=False, add=unit.gradients.reduced))
        unit.gradients = GradientState.REDUCED

    def _wait_for_update(self, unit: Unit) -> None:
        event = self._updates.take_read_event(unit.index)
        if event is not None:
            # Write after read: gradients must not change until the update beside compute has read them. The reduce
            # that writes them waits for compute.
            self._streams.wait(Stream.COMPUTE, event)

    def _refuse_unplanned(self, unit: Unit) -> None:
        accumulate = self._plan.policy.accumulate
        if not unit.gradients.reduced or (accumulate and all(lists.divided for lists in self._lists[unit.index])):
            return
        if accumulate:
            raise UsageError(
                f"a backward after the gradient of unit {unit.label!r} was summed over the ranks, which happens once "
                "per step where gradients rest whole (stages 0 and 1): ask for the norm, or for gradients "
                "(clip_grad_norm_, safe_get_full_grad), after the last backward. Call step() or zero_grad() before "
                "the next one"
            )
        if self._plan.policy.micro_batches > 1:
            raise UsageError(
                f"a second backward before the step: the gradient of unit {unit.label!r} has no accumulator in the "
                f"plan, which sums {self._plan.policy.micro_batches} micro-batches in the vertical order alone. Hand "
                "all of them to VerticalSchedule.step(), or to the engine's train_batch(); or say accumulate=True in "
                "place of micro_batches"
            )
        raise UsageError(
            f"a second backward before the step: the gradient of unit {unit.label!r} has no accumulator in the plan. "
            "Say shard(..., accumulate=True), or give the engine gradient_accumulation_steps; where their number "
            "is not known before, call engine.set_gradient_accumulation_boundary(False) ahead of all but the last, "
            "or set managed_gradient_accumulation to false. Call step() or zero_grad() after the last"
        )


def _run(actions: list[Action], args: BackwardArgs) -> None:
    for action in actions:
        action(args)
