"""The runtime: runs a plan's operation lists at the hooks of a model, one pass after the other.

    model.forward    pre_forward(unit)  -> forward list up to USE unit      post_forward(unit) -> RELEASE unit
    loss.backward    output gradient    -> backward list up to USE unit     end of graph       -> rest of the list
    step             reduce what is pending, norms, update, gather for the next forward

It decides nothing: what is gathered when, where gradients rest and what is summed stands in the plan. It knows plans
only, never configs.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.peers import Peers
from zeroshard.engine.core.autograd import (
    NodeOrder,
    accumulates,
    carrier,
    graph_task,
    in_backward,
    node_number,
    transforming,
)
from zeroshard.engine.core.changes import WholeChanges
from zeroshard.engine.core.cursor import Cursor
from zeroshard.engine.core.gradients import Gradients
from zeroshard.engine.core.inner_backward import (
    InnerBackward,
    handed_over,
    refuse_backward_in_forward,
    refuse_sharded,
)
from zeroshard.engine.core.inspection import Inspection
from zeroshard.engine.core.interrupted import EndOfBackward, refuse_half_done, refuse_transform
from zeroshard.engine.core.late_gradients import add_late_gradients
from zeroshard.engine.core.outputs import refuse_no_tensor, tensors_in
from zeroshard.engine.core.outside_reads import OutsideReads
from zeroshard.engine.core.parameters import Parameters
from zeroshard.engine.core.passes import CallTracker, ForwardPass
from zeroshard.engine.core.pending_updates import PendingUpdates
from zeroshard.engine.core.reducing import Reducing
from zeroshard.engine.core.state_at_rest import StateAtRest
from zeroshard.engine.core.streams import Streams
from zeroshard.engine.memory.group import Unit
from zeroshard.engine.memory.parking import Parkable, Parking
from zeroshard.engine.memory.storage import Storage
from zeroshard.errors import UsageError
from zeroshard.mesh import Axes
from zeroshard.plan.accumulation import with_accumulation
from zeroshard.plan.builder import reordered, with_kept
from zeroshard.plan.legs import Stream
from zeroshard.plan.plan import Plan
from zeroshard.plan.program import Op, OpKind, build_programs
from zeroshard.sharding.resting import unguarded


class Runtime:
    """Executes `plan` for `model`.

    Args:
        gathers, reduces: communicators by mesh axes, for all-gathers and for reduces.
        log: what this rank issues, in the order of the lists.
        peers: peer memory with the shards and reduce slots, where ranks copy from each other; else they send.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        storage: Storage,
        streams: Streams,
        gathers: Mapping[Axes, Collectives],
        reduces: Mapping[Axes, Collectives],
        log: OperationLog,
        peers: Peers | None = None,
    ) -> None:
        self.model = model
        self.storage = storage
        self.streams = streams
        self.peers = peers
        self.updates = PendingUpdates()
        self.parking = Parking()
        self.parameters = Parameters(plan, storage, streams, gathers, log, peers, self.updates)
        self.gradients = Gradients(plan, storage, streams, reduces, log, peers, self.updates)
        self.inspection = Inspection(storage.units)
        self._whole_changes = WholeChanges(storage.units, storage.device)
        self._inner = InnerBackward(storage.units, self.parameters)
        self.names_in_state_dict = False
        """Whether state_dict() of sharded parameters gives names and shapes, in place of an error."""
        self._tracker = CallTracker()
        self._order = NodeOrder()
        self._root = next(unit.index for unit in storage.units if unit.plan.name == "")
        self.reads = OutsideReads(storage.units, self.parameters, self._tracker, lambda: self._inside is not None)
        self._inside: int | None = None
        self._part: int | None = None
        self.reducing = Reducing()
        self._seen_order: list[int] | None = []
        self._saw_forward = False
        self._backward_running = False
        self._task = -1  # the graph of the pass's backward, while it runs
        self._ending: Callable[[], object] = lambda: None
        self._collects = True
        self._pending: deque[int] = deque()
        self._end = 0
        self._begun: dict[int, int] = {}  # by unit, where autograd's count of nodes was when its last call began
        self._set_plan(plan)
        if peers is not None:
            self.parameters.written(())  # a peer may gather before this rank has its first values

    def _set_plan(self, plan: Plan) -> None:
        self.plan = plan
        self.reads.kept = (self._root, *plan.kept)
        self._programs = build_programs(plan)
        self._forward = Cursor(self._programs.forward, self._execute)
        self._backward = Cursor(self._programs.backward, self._execute)

    @property
    def units(self) -> list[Unit]:
        return self.storage.units

    # Forward.

    def pre_forward(self, index: int) -> None:
        """A unit's module is about to run: make its parameters whole."""
        self._begun[index] = torch.autograd._get_sequence_nr()
        if in_backward():  # recomputation: its post-hook may never come, so nothing is paired with it
            self.parameters.use(index)
            return
        if index == self._root:
            self._begin_pass()
        elif self._tracker.current is None and torch.is_grad_enabled():
            refuse_transform(self.units)
            self.streams.follow_caller()
            self._tracker.begin_pass()  # a submodule called by itself: a pass of its own
        self._tracker.start_call(index)
        in_pass = self._tracker.current is not None and index != self._root and self._part is None
        if self._seen_order is not None and in_pass and not self._saw_forward:
            self._seen_order.append(index)
        if not self._forward.run_to_use(index):
            self.parameters.use(index)

    def post_forward(self, index: int, output: object) -> None:
        """A unit's module has run: watch its output's gradient and release the unit."""
        if in_backward():
            if torch.is_grad_enabled():
                self._watch(index, output, None, self._tracker.recomputed_call(index))
            return
        call = self._tracker.end_call(index)
        if call is not None and torch.is_grad_enabled():
            if transforming():
                if index not in self.reads.kept:  # its derivative is taken after the release
                    refuse_transform((self.units[index],))
            else:
                if index != self._root:
                    refuse_no_tensor(self.units[index], output)
                self._watch(index, output, *call)
        if index == self._root:
            self._end_pass()
        elif index in self.reads.kept:
            if self._inside is None and not torch.is_grad_enabled():  # called by itself: no pass ends behind it
                self.parameters.release(index)
        elif not self._forward.run_release(index):
            self.parameters.release(index)

    def enter(self, face: int) -> None:
        """A module that holds the whole root unit is about to run; the first one to come is this pass's model."""
        if in_backward():
            self.parameters.use(self._root)
        elif self._inside is None:
            self._inside = face
            self.pre_forward(self._root)

    def leave(self, face: int, output: object, *, failed: bool) -> None:
        """Such a module has run, or ended in an exception."""
        mine = in_backward() or self._inside == face
        if self._inside == face:
            self._inside = None
        if mine and not failed:
            self.post_forward(self._root, output)

    def enter_part(self, part: int) -> None:
        """A module that reads parameters of the root unit is about to run; outside of a pass it is one by itself."""
        if not in_backward() and self._inside is None:
            self._inside = self._part = part
            self.pre_forward(self._root)

    def leave_part(self, part: int, output: object, *, failed: bool) -> None:
        """Such a module has run, or ended in an exception."""
        if self._part == part:
            if not failed:
                self.post_forward(self._root, output)
            self._inside = self._part = None

    def _begin_pass(self) -> None:
        self.parking.refuse("a forward", Parkable.LP_PARAMS)
        refuse_transform(self.units)
        self.streams.follow_caller()
        if self._backward_running or self._forward.started:
            self._recover()
        self._order.forward_begins()
        self.parameters.changes.begin_pass()
        self.inspection.before_pass()
        if torch.is_autocast_enabled(self.storage.device.type):
            torch.clear_autocast_cache()  # casts of an earlier pass hang on its graph and may be of older weights
        if torch.is_grad_enabled():
            self._tracker.begin_pass()
        self.reads.begin_pass()

    def _end_pass(self) -> None:
        if self._part is None:
            self._forward.run_to_end()  # of a part: the rest of the model is not gathered for its sake
        self._forward.rewind()
        self._settle_resting()  # of gathers that a write outside of a step left to this pass
        if torch.is_grad_enabled():
            # The forwards of further micro-batches are the same again.
            self._saw_forward = self._saw_forward or self._part is None
        else:
            self.reads.release()
        self._tracker.end_pass()

    def _recover(self) -> None:
        """A forward or backward was ended by an exception: drop what it left half-done."""
        self._forward.rewind()
        self._backward.rewind()
        self._inner.forget()
        self.parameters.release_all()
        if self._seen_order and not self._saw_forward:
            self._seen_order.clear()
        if self._backward_running:
            self._backward_running = False
            self._tracker.end_backward()
            self._pending.clear()
            self.clear_gradients()

    # Backward.

    def _watch(self, index: int, output: object, graph: ForwardPass | None, end: int) -> None:
        """Call `pre_backward` when the gradient of any of the output's tensors is ready.

        What a unit hands on as it came (a block that is dropped inside of its own forward) is left out: that gradient
        is ready when its maker is due, and gathering this unit then would take the maker's slot.
        """
        seen_task = -1
        begun = -1 if index == self._root else self._begun[index]

        def ready(origin: weakref.ref[torch.Tensor], gradient: torch.Tensor) -> None:
            nonlocal seen_task
            task = graph_task()
            if task == seen_task or (not self._leading() and handed_over(origin)):
                return
            seen_task = task
            if torch.is_grad_enabled():  # create_graph
                self._watch_gradient(index, gradient)
            # `graph` in this closure is what keeps the pass alive exactly as long as the autograd graph.
            self._pre_backward(index, end, graph)

        for tensor in tensors_in(output):
            if tensor.requires_grad and node_number(tensor) >= begun:
                carried = carrier(tensor, begun)
                carried.register_hook(partial(ready, weakref.ref(carried)))

    def _watch_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """A backward that builds a graph comes to a unit: the backward of that graph may come to no other output."""
        if index != self._root and self.units[index].plan.sharded:
            refuse_sharded(self.units[index])

        def ready(origin: weakref.ref[torch.Tensor], _: torch.Tensor) -> None:
            if not self._leading() and not handed_over(origin):
                self._lead()

        if gradient.requires_grad:
            gradient.register_hook(partial(ready, weakref.ref(gradient)))

    def _pre_backward(self, index: int, end: int, graph: ForwardPass | None) -> None:
        if not self._leading() and not self._lead():
            self._inner.use(index)
            return
        if graph is not None:
            self._tracker.reach(graph)
        self._end = end
        self._finish_complete()
        if not self._backward.run_to_use(index):
            self.parameters.use(index)

    def _leading(self) -> bool:
        """Whether the graph that is running is known to be the backward of a pass."""
        return self._backward_running and graph_task() == self._task

    def _lead(self) -> bool:
        """Begin the backward of a pass, unless the graph that is running is an inner one.

        True as well for the part of a pass's backward that a reentrant checkpoint runs in a graph of its own.
        """
        if self._inner.running:
            return False
        if self._backward_running and self._ending() is None:
            refuse_half_done("a backward")
        collects = accumulates(
            parameter for unit in self.units for group in unit.trainable for parameter in group.parameters
        )
        if self._inside is not None:
            if collects:
                refuse_backward_in_forward()
            return False
        if self._backward_running:
            return collects
        self._begin_backward(collects)
        return True

    def _begin_backward(self, collects: bool) -> None:
        self.parking.refuse("a backward", Parkable.LP_PARAMS, Parkable.LP_GRADS)
        self.reducing.begin_backward(collects)
        self._backward_running, self._task, self._collects = True, graph_task(), collects
        end = EndOfBackward(self._end_backward)
        self._ending = weakref.ref(end)
        self.streams.follow_caller()
        self._tracker.end_pass()
        if not self._order.kept():
            self._tracker.lose_order()
        self._backward.rewind()
        self._pending.clear()
        self.inspection.take_over()
        self.gradients.notice_dropped()
        if self._collects:
            self.gradients.discard_leftovers()
        self.reads.begin_backward()
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _finish_complete(self) -> None:
        """Collect and reduce pending units, in the order of the list, as long as their gradients are complete."""
        while self._pending and (self._end < 0 or self._tracker.complete(self._pending[0], self._end)):
            unit = self.units[self._pending.popleft()]
            if self._collects:
                whole, sharded = self.reducing.reduces(self.plan.policy.accumulate)
                self.gradients.finish_unit(unit, self.reducing.factor, reduce_whole=whole, reduce_sharded=sharded)
            if unit.index != self._root:
                self.parameters.release(unit.index)

    def _end_backward(self) -> None:
        self._end = -1
        self._finish_complete()
        self._backward.run_to_end()
        self._backward_running = False
        self._order.backward_ends()
        self._tracker.end_backward()
        self.parameters.let_go()
        if self._collects:
            for index in add_late_gradients(self.units, self.gradients, self.streams, self.reducing.factor):
                self.reads.expect(index)
            self.gradients.show_collected()

    # Both.

    def _execute(self, op: Op) -> None:
        if op.kind is OpKind.GATHER:
            self.parameters.gather(op.unit)
        elif op.kind is OpKind.USE:
            self.parameters.use(op.unit)
        elif op.kind is OpKind.REDUCE:
            self._pending.append(op.unit)
            self._finish_complete()
        elif op.unit not in self._pending and (op.unit != self._root or self._collects):
            # Parameters keep their shape until their gradients are collected. The root keeps it until a backward that
            # collects, for that may be one through the graph of this one.
            self.parameters.release(op.unit)

    # Step.

    def inspect(self) -> None:
        """Before a step. Raises UsageError when parameters or gradients are not what the step would work on."""
        self.parking.refuse("a step")
        if self._backward_running:
            refuse_half_done("a step")
        if self._whole_changes.due():
            self.drain()
            self._whole_changes.follow()
        self.gradients.notice_dropped()
        self.inspection.before_step(present=self.gradients.present)

    def finish_gradients(self) -> None:
        """Reduce whatever no backward has reduced; compute then waits for all reduces."""
        self.streams.follow_caller()
        for index in () if self.reducing.keeps_local else reversed(tuple(dict.fromkeys(self.plan.order))):
            self.gradients.reduce_pending(self.units[index])
        # Read after write: gradients belong to the reduce stream until its last reduce has landed.
        self.streams.wait(Stream.COMPUTE, self.streams.record(Stream.REDUCE, "all"))
        self.streams.touch(reads=tuple(("grad", unit.index) for unit in self.units))

    def after_step(self, *, changed: bool, captured: bool = False) -> None:
        """The optimizer has run: drop the gradients and gather what the next forward needs first.

        Args:
            captured: the step goes into a graph, which ends when the last gather has landed.
        """
        self.parameters.each_by_itself = captured
        self.clear_gradients()
        if changed:
            self.parameters.written()
        for op in self._programs.after_step:
            self._execute(op)
        self._settle_resting()
        self.parameters.each_by_itself = False

    def _settle_resting(self) -> None:
        """Gathers after a write have been issued: unless these overlap, what rests whole is the caller's from here."""
        self.parameters.meet_peers()
        if not self.plan.policy.overlap_step:
            self.parameters.settle(resting_only=True)

    def clear_gradients(self) -> None:
        """Forget all gradients, as optimizer.zero_grad() does."""
        self.gradients.clear()
        with unguarded():
            for unit in self.units:
                for group in unit.trainable:
                    for parameter in group.parameters:
                        parameter.grad = None

    @property
    def at_rest(self) -> bool:
        """Whether no forward waits for its backward and no gradients for their step; equal on all ranks."""
        return self.between_passes and not self.gradients.present

    @property
    def between_passes(self) -> bool:
        """Whether no forward waits for its backward; equal on all ranks."""
        return not (self._tracker.waits or self._forward.started or self._backward_running)

    @property
    def seen_order(self) -> tuple[int, ...] | None:
        """Units in the order of the first forward under grad, None once `adopt_order` was called."""
        return None if self._seen_order is None else tuple(self._seen_order)

    def adopt_order(self, order: tuple[int, ...] | None) -> None:
        """Between steps: run the lists in `order` from now on (None keeps the plan's), and stop watching the order."""
        self._seen_order = None
        plan = self.plan if order is None else reordered(self.plan, (self._root, *order))
        if plan.order != self.plan.order:
            self._adopt(plan)

    def foresee_reads(self) -> None:
        """Between steps: have the plan keep the units that other modules than their own read."""
        if new := self.reads.take():
            self._adopt(with_kept(self.plan, (*self.plan.kept, *new)))

    def start_accumulating(self, dtype: str | None) -> None:
        """Between steps: take accumulators of `dtype` for several micro-batches per step, if there are none yet."""
        plan = with_accumulation(self.plan, dtype)
        if plan is not self.plan:
            self._adopt(plan)

    def _adopt(self, plan: Plan) -> None:
        self.drain()
        self.parameters.release_all()
        self.storage.adopt(plan)
        self.parameters.adopt(plan)
        self.gradients.adopt(plan)
        self._set_plan(plan)
        self.parameters.written()  # new slots are empty, and the step before this wrote the shards

    def resting(self) -> StateAtRest:
        """The state between two steps: from equal ones the same step issues the same operations on the same memory.

        Raises UsageError amid a step: something is in progress, or gradients wait for one.
        """
        if self._forward.started or self._backward_running or self.gradients.present:
            raise UsageError("amid a step: a forward, a backward or its gradients wait for optimizer.step()")
        gathered = (self.parameters.resting(), self.gradients.last_slot)
        return StateAtRest((id(self.plan), self.parking.reloads), gathered)

    def abandon(self) -> None:
        """What was issued since the last step will never run: forget what it would have brought about."""
        self.parameters.release_all()
        self.parameters.settle()
        self.parameters.invalidate()
        self._recover()
        self.clear_gradients()

    def drain(self) -> None:
        """Finish everything in flight. Every reader outside of a forward passes here."""
        self.parking.refuse("whoever reads or changes state")
        self.streams.follow_caller()
        self.parameters.finish_updates()
        self.parameters.settle()
        self.streams.drain()
        if self.plan.away:
            self.streams.settle_host()
        self.parameters.changes.report()
        self.inspection.take_over()
