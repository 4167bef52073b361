"""The runtime of one sharded model: its hooks run the operation lists of the plan, one pass after the other.

    model.forward    forward.py      walks the forward list; the hooks of modules call it
    loss.backward    backward.py     walks the backward list; hooks on gradients call it
    step             here            reduce what is pending, update by the stepper, gather for the next forward

The runtime makes no decisions: the plan says what is gathered when, where gradients rest and what is summed. It knows
plans only, never configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.peers import Peers
from zeroshard.engine.core.autograd import NodeOrder, in_backward, made_by_backwards, transforming
from zeroshard.engine.core.backward import Backward
from zeroshard.engine.core.changes import WholeChanges
from zeroshard.engine.core.cursor import Cursor
from zeroshard.engine.core.disk_failures import Report, disk_failures_to
from zeroshard.engine.core.forward import Forward
from zeroshard.engine.core.gradients import Gradients
from zeroshard.engine.core.interrupted import refuse_half_done, refuse_transform
from zeroshard.engine.core.kept_views import KeptViews
from zeroshard.engine.core.outside_reads import OutsideReads
from zeroshard.engine.core.parameters import Parameters
from zeroshard.engine.core.passes import CallTracker
from zeroshard.engine.core.pending_updates import PendingUpdates
from zeroshard.engine.core.reduce_policy import ReducePolicy
from zeroshard.engine.core.scaled_weights import ScaledWeights
from zeroshard.engine.core.state_at_rest import StateAtRest
from zeroshard.engine.core.streams import Streams
from zeroshard.engine.core.tied import TiedCopies
from zeroshard.engine.memory.parking import Parkable, Parking
from zeroshard.engine.memory.storage import Storage
from zeroshard.engine.memory.unit import Unit
from zeroshard.errors import UsageError
from zeroshard.fp8.linear import adopt_codes
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
        report_failure: lets all ranks know of a disk that failed.
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
        report_failure: Report | None = None,
    ) -> None:
        self.model, self._log, self._report_failure = model, log, report_failure
        self.storage = storage
        self.streams = streams
        self.peers = peers
        self.updates = PendingUpdates()
        self.parking = Parking()
        self.parameters = Parameters(plan, storage, streams, gathers, log, peers, self.updates, report_failure)
        self.reduce_policy = reduce_policy = ReducePolicy()
        self.gradients = Gradients(
            plan, storage, streams, reduces, log, peers, self.updates, lambda: reduce_policy.in_no_sync
        )
        self.inspection = self.parameters.inspection
        self._whole_changes = WholeChanges(storage.units, storage.device)
        self._kept_views = KeptViews(model, storage.gather_slots)
        self.names_in_state_dict = False
        """Whether state_dict() gives names and shapes of sharded parameters instead of an error."""
        self.tied: TiedCopies | None = None
        """Units that other pipeline stages hold copies of; None where there are none."""
        self._tracker = tracker = CallTracker()
        self._root = root = next(unit.index for unit in storage.units if unit.plan.name == "")
        units, parameters = storage.units, self.parameters
        self.reads = OutsideReads(units, parameters, tracker, self._forward_running)
        self.backward = Backward(
            units,
            root,
            parameters,
            self.gradients,
            streams,
            tracker,
            self.reads,
            self.reduce_policy,
            self._begin_backward,
            self._forward_running,
            NodeOrder(partial(made_by_backwards, storage.device) if storage.device.type == "cuda" else None),
        )
        at_passes = (self._begin_pass, self._settle_resting, self._recover)
        self.forward = Forward(units, root, parameters, streams, tracker, self.reads, self.backward, *at_passes)
        self._set_plan(plan)
        if peers is not None:
            self.parameters.mark_written(())  # a peer may gather before this rank has its first values
        self._record_values()

    def _set_plan(self, plan: Plan) -> None:
        self.plan = plan
        self.reads.kept = (self._root, *plan.kept)
        self._programs = build_programs(plan)
        self.forward.adopt(Cursor(self._programs.forward, self._execute))
        self.backward.adopt(Cursor(self._programs.backward, self._execute), accumulate=plan.policy.accumulate)

    def _forward_running(self) -> bool:
        """Whether a forward is running."""
        return self.forward.inside is not None

    def _inside_or_backward(self) -> bool:
        return self._forward_running() or in_backward()

    @property
    def units(self) -> list[Unit]:
        return self.storage.units

    def _begin_pass(self) -> None:
        self.parking.refuse("a forward", Parkable.LP_PARAMS)
        refuse_transform(self.units)
        self.streams.adopt_current_stream()
        if self.backward.running or self.forward.started:
            self._recover()
        trains = torch.is_grad_enabled() and not transforming()
        self.backward.order.forward_begins(first=trains and not self._tracker.waits)
        self.parameters.changes.begin_pass()
        if self.parameters.changes.active or self._kept_views.suspects:
            self._kept_views.look()
        self.inspection.before_pass()
        if torch.is_autocast_enabled(self.storage.device.type):
            torch.clear_autocast_cache()  # its casts belong to the graph of an earlier pass
        if torch.is_grad_enabled():
            self._tracker.begin_pass()
        self.reads.begin_pass()

    def _begin_backward(self) -> None:
        self.parking.refuse("a backward", Parkable.LP_PARAMS, Parkable.LP_GRADS)
        self.take_over()

    def _recover(self) -> None:
        """Drop what a forward or backward left behind when it ended in an exception."""
        self.forward.recover()
        failed = self.backward.recover()
        self.parameters.release_all()
        if failed:
            self.clear_gradients()

    def _execute(self, op: Op) -> None:
        if op.kind is OpKind.GATHER:
            self.parameters.gather(op.unit)
        elif op.kind is OpKind.READ:
            self.parameters.read(op.unit)
        elif op.kind is OpKind.USE:
            self.parameters.use(op.unit)
        elif op.kind is OpKind.REDUCE:
            self.backward.await_gradients(op.unit)
        elif self.backward.may_release(op.unit):
            self.parameters.release(op.unit)

    def scale_weights(self, everyone: Collectives) -> None:
        """Make the codes of weights that rest in fp8, if there are any; `everyone` spans all ranks of the plan."""
        if any(group.scaled for _, group in self.plan.groups()):
            made = ScaledWeights(self.units, self.storage.device, everyone, self._log, self._inside_or_backward)
            adopt_codes(self.model)
            self.parameters.scaled = made
            self.parameters.mark_written(())

    def check_every_pass(self) -> None:
        """From now on check in every pass and step for writes that version counters do not show."""
        self.parameters.changes.always = self._whole_changes.always = True

    # Step.

    def inspect(self) -> None:
        """Check the model before a step. Raises UsageError if user code changed parameters or gradients wrongly."""
        self.parking.refuse("a step")
        if self.backward.running:
            refuse_half_done("a step")
        if self._whole_changes.due():
            self.drain()
            self._follow_unnoted_writes()
        self.gradients.notice_dropped()
        self.take_over()
        self.inspection.before_step(present=self.gradients.present)

    def take_over(self) -> None:
        """Update master weights after changes in place. Raises UsageError for changes that would be lost."""
        with disk_failures_to(self._report_failure):
            self.inspection.take_over()

    def finish_gradients(self) -> None:
        """Reduce all pending gradients; compute then waits for all reduces."""
        self.streams.adopt_current_stream()
        for index in () if self.reduce_policy.keeps_local else reversed(tuple(dict.fromkeys(self.plan.order))):
            self.gradients.reduce_pending(self.units[index])
        # Read after write: the last reduce must have finished.
        self.streams.wait(Stream.COMPUTE, self.streams.record(Stream.REDUCE, "all"))
        self.streams.touch(reads=tuple(("grad", unit.index) for unit in self.units))
        if self.tied is not None:
            self.tied.sum_gradients()

    def after_step(self, *, changed: bool, captured: bool = False) -> None:
        """The optimizer has run: drop the gradients and gather what the next forward needs first.

        Args:
            captured: the step is captured into a CUDA graph, which ends with the last gather.
        """
        self.parameters.wait_per_unit = captured
        self.clear_gradients()
        if changed:
            self.parameters.mark_written()
        for op in self._programs.after_step:
            self._execute(op)
        self._settle_resting()
        self.parameters.wait_per_unit = False
        if changed and not captured:
            self._record_values()

    def _record_values(self) -> None:
        """Parameters that rest whole have new values: let the check of the next step know them, if there is one."""
        if self._whole_changes.record_next():
            # Read after write: the gathers of parameters that rest whole must have finished.
            self.parameters.wait_for_gathers(resting_only=True)
            self._whole_changes.record()

    def _settle_resting(self) -> None:
        """After the gathers that follow a write: unless they overlap, wait for parameters that rest whole."""
        self.parameters.issue_peer_barrier()
        if not self.plan.policy.overlap_step:
            self.parameters.wait_for_gathers(resting_only=True)

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
    def may_accumulate(self) -> bool:
        """Whether gradients may move to other memory: at rest, or before a backward if no parameter is sharded."""
        whole = not any(unit.plan.sharded for unit in self.units) and not self.forward.started
        return not self.gradients.present and (self.at_rest or (whole and not self.backward.running))

    @property
    def between_passes(self) -> bool:
        """Whether no forward waits for its backward; equal on all ranks."""
        return not (self._tracker.waits or self.forward.started or self.backward.running)

    @property
    def seen_order(self) -> tuple[int, ...] | None:
        """Units in the order of the first forward under grad; None after `adopt_order`."""
        return None if self.forward.seen_order is None else tuple(self.forward.seen_order)

    def adopt_order(self, order: tuple[int, ...] | None) -> None:
        """Between steps: run the lists in `order` from now on (None keeps the plan's), and stop recording the order."""
        self.forward.seen_order = None
        plan = self.plan if order is None else reordered(self.plan, (self._root, *order))
        if plan.order != self.plan.order:
            self._adopt(plan)

    def adopt_outside_reads(self) -> None:
        """Between steps: adopt a plan that keeps units gathered which modules of other units read."""
        if new := self.reads.take_new():
            self._adopt(with_kept(self.plan, (*self.plan.kept, *new)))

    def start_accumulating(self, dtype: str | None) -> None:
        """Between steps: take accumulators of `dtype` for several micro-batches per step, if there are none yet."""
        plan = with_accumulation(self.plan, dtype)
        if plan is not self.plan:
            self._adopt(plan)

    def _adopt(self, plan: Plan) -> None:
        self.drain()
        self._kept_views.look()
        self.parameters.release_all()
        self.storage.adopt(plan)
        self._kept_views.adopt(self.storage.gather_slots)
        self.parameters.adopt(plan)
        self.gradients.adopt(plan)
        self._set_plan(plan)
        self.parameters.mark_written()  # the new slots are empty

    def resting(self) -> StateAtRest:
        """The state between two steps; from equal states a step issues the same operations on the same memory.

        Raises UsageError within a step: a forward or backward is running, or gradients wait for the step.
        """
        if self.forward.started or self.backward.running or self.gradients.present:
            raise UsageError("within a step: a forward, a backward or its gradients wait for optimizer.step()")
        gathered = (self.parameters.resting(), self.gradients.last_slot)
        return StateAtRest((id(self.plan), self.parking.reloads), gathered)

    def abandon(self) -> None:
        """Forget the operations that were issued since the last step, since they will never run."""
        self.parameters.release_all()
        self.parameters.wait_for_gathers()
        self.parameters.invalidate()
        self._recover()
        self.clear_gradients()

    def drain_for_saving(self) -> None:
        """As `drain`; master weights also follow writes past version counters, if the next step would look for them."""
        self.drain()
        if self._whole_changes.next_is_checked:
            self._follow_unnoted_writes()

    def _follow_unnoted_writes(self) -> None:
        """Update master weights after writes past version counters, while nothing is in flight."""
        with disk_failures_to(self._report_failure):
            self._whole_changes.update_master_weights()

    def drain(self) -> None:
        """Finish all running operations. Everything that reads state outside of a forward calls this first."""
        self.parking.refuse("reading or changing state")
        self.streams.adopt_current_stream()
        self.parameters.finish_updates()
        self.parameters.wait_for_gathers()
        self.parameters.wait_for_disk_reads()
        self.streams.drain()
        if self.plan.off_device:
            self.streams.wait_on_host()
        self.parameters.changes.report()
        self.take_over()
