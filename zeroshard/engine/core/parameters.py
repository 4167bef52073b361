"""Gathers units into their slots, lets their parameters show the values, and releases them.

It owns the gather slots. A slot is written on the gather stream and read on the compute stream:

    read after write    compute waits for the unit's `gathered` event before its first use
    write after read    a gather waits for the slot's `free` event: compute has passed the last use of its last unit
    shard after step    a gather waits for `written`: the optimizer wrote the shards on the compute stream, or beside it
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

from zeroshard.comm.collectives import Collectives, Pending
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.peers import Channel, Peers
from zeroshard.engine.core.autograd import in_backward
from zeroshard.engine.core.changes import ForwardChanges
from zeroshard.engine.core.disk_failures import Report
from zeroshard.engine.core.gather_steps import GatherSteps
from zeroshard.engine.core.inspection import Inspection, refuse_replaced
from zeroshard.engine.core.interrupted import refuse_tracing
from zeroshard.engine.core.parameter_reads import ParameterReads
from zeroshard.engine.core.pending_updates import PendingUpdates
from zeroshard.engine.core.scaled_weights import ScaledWeights
from zeroshard.engine.core.streams import Buffers, Event, Step, Streams
from zeroshard.engine.memory.storage import Storage
from zeroshard.engine.memory.unit import Unit, UnitState
from zeroshard.errors import UsageError
from zeroshard.mesh import Axes
from zeroshard.plan.legs import Stream
from zeroshard.plan.plan import Plan
from zeroshard.plan.traffic import new_ledger
from zeroshard.sharding.slots import Outdated


class Parameters:
    """Gathers and releases units, and orders these operations by events.

    Args:
        gathers: the gather communicators, by mesh axes.
        log: records what this rank issues, in the order of the lists (a queue may start it later).
        peers: the peer memory that holds the shards; None if ranks gather by collectives.
        updates: pending updates, which run beside compute.
        report_failure: lets all ranks know of a disk that failed.

    Attributes:
        wait_per_unit: every gather waits for the update of its own unit only, not just the first gathers.
        changes: finds writes of the model's code to gathered parameters.
    """

    def __init__(
        self,
        plan: Plan,
        storage: Storage,
        streams: Streams,
        gathers: Mapping[Axes, Collectives],
        log: OperationLog,
        peers: Peers | None = None,
        updates: PendingUpdates | None = None,
        report_failure: Report | None = None,
    ) -> None:
        self._peers = peers
        self._updates = PendingUpdates() if updates is None else updates
        self._streams = streams
        self._log = log
        self._storage = storage
        self._gathers = gathers
        self.wait_per_unit = False
        self.changes = ForwardChanges(storage.device)
        self.scaled: ScaledWeights | None = None
        """The weights that rest in fp8; None where there are none."""
        self.inspection = Inspection(storage.units)
        self._reads = ParameterReads(storage.units, storage.read_windows, streams, self._updates, report_failure)
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Start anew under a plan (another order has other slots); nothing may be in use."""
        self._slots, self._mesh = plan.gather_slots.of_unit, plan.mesh
        self._ledger = new_ledger(plan)
        self._free: dict[int, Event] = {}
        self._gathered: dict[int, Event] = {}
        self._written: dict[int, Event] = {}
        # Updates beside compute do not finish in order: the last unit's event would not stand for the others.
        beside = bool(plan.updates)
        self._gathers_since_write, self._separate_waits = 0, len(plan.units) + 1 if beside else plan.policy.prefetch + 2
        self._await_barrier: list[int] = []
        self._passed_barrier: Event | None = None
        self._versions: dict[int, list[int]] = {}
        self._sizes = [unit.plan.gathered_nbytes for unit in self._storage.units]
        self._gather_steps = GatherSteps(plan.legs, self._storage, self._gathers, self._reads, self._peers)
        self._steps = [self._steps_of(unit, Outdated.NOTHING) for unit in self._storage.units]
        renewed = (unit for unit in self._storage.units if any(legs.refresh for legs in plan.legs[unit.index]))
        self._after_renewal = {
            unit.index: {outdated: self._steps_of(unit, outdated) for outdated in Outdated} for unit in renewed
        }

    def _steps_of(self, unit: Unit, outdated: Outdated) -> list[Step]:
        """The steps that gather a unit into its slot, after renewing the outdated part of its second copy."""
        return self._gather_steps.into(unit, [group.whole for group in unit.groups], self._buffer(unit.index), outdated)

    def read(self, index: int) -> None:
        """Begin to read a unit from disk for its next gather, unless its whole parameters are there already."""
        if not self._ledger.holds(index) and not _all_in_gathered_block(self._storage.units[index]):
            self._reads.begin(index)

    def gather(self, index: int) -> None:
        """All-gather a unit into its slot beside compute, unless its whole parameters are there already."""
        unit = self._storage.units[index]
        if self._ledger.holds(index) or _all_in_gathered_block(unit):
            return
        evicted, slot = self._ledger.take(index), self._slots[index]
        if evicted is not None and slot is not None:
            self._gathered.pop(evicted, None)
            self._hide_values(self._storage.units[evicted], slot, UnitState.RESTING)
        self._hide_values(unit, slot, UnitState.RESTING)  # the values that it shows are out of date
        if slot is not None and slot in self._free:
            # Write after read: compute must have passed the release of the last unit in the slot.
            self._streams.wait(Stream.GATHER, self._free[slot])
        if index in self._written or self._updates.is_pending(index):
            self._await_written(index)
        if slot is not None and self._streams.poisons:
            self._streams.enqueue(Stream.GATHER, lambda: self._poison(index), writes=(self._buffer(index),))
        steps = self._steps[index]
        if index in self._after_renewal:
            steps = self._after_renewal[index][self._ledger.take_outdated(index)]
        unit.become(UnitState.GATHERING)
        try:
            self._run_gather(unit, steps)
        except (RuntimeError, AssertionError) as error:  # the slot was not written, so it must not count as gathered
            self._ledger.gather_failed(index)
            unit.become(UnitState.RESTING)
            refuse_tracing(error)
            raise
        self._gathered[index] = self._streams.record(Stream.GATHER, ("gathered", index))
        if slot is None:
            self._versions[index] = _versions(unit)
            if self._peers is not None:
                self._await_barrier.append(index)

    def _run_gather(self, unit: Unit, steps: Sequence[Step]) -> None:
        """Issue the steps of a gather on the gather stream."""
        if unit.plan.reads:
            self._reads.begin(unit.index)
        for step in steps:
            if step.sends:
                self._log.record("all-gather", unit.label, self._sizes[unit.index])
        self._streams.run(Stream.GATHER, steps)
        if unit.plan.reads:
            self._reads.mark_copied(unit.index)

    def use(self, index: int) -> None:
        """Make the unit's parameters whole for compute, from here to the release."""
        unit = self._storage.units[index]
        if _all_in_gathered_block(unit):
            return
        if not self._ledger.holds(index):
            self.gather(index)
        if index in self._gathered:
            # Read after write: the gather must have finished.
            self._land(index)
        self._streams.touch(reads=self._used(index))
        shown = unit.in_use
        if unit.state is not UnitState.PENDING:
            unit.become(UnitState.IN_USE)
        if not shown:
            if not unit.gathered_beside:
                unit.show()
            if self.changes.active:
                self.changes.record(unit, beside=False)

    def await_gradients(self, index: int) -> None:
        """A backward waits for the unit's gradients: its parameters keep their shape until they are collected."""
        unit = self._storage.units[index]
        if unit.state is UnitState.IN_USE:
            unit.become(UnitState.PENDING)

    def keep_in_use(self, index: int) -> None:
        """The gradients have been collected, but the unit is not released yet."""
        unit = self._storage.units[index]
        if unit.state is UnitState.PENDING:
            unit.become(UnitState.IN_USE)

    def release(self, index: int) -> None:
        """End the use of a unit: the parameters of a sharded unit rest, and its slot may be written again.

        Raises UsageError if the model's code wrote to a parameter or gave it other data, which would be lost.
        """
        unit = self._storage.units[index]
        if unit.in_use and not unit.rests_whole:
            for group in unit.groups:
                refuse_replaced(group)
            self.inspection.accept_rewritten(unit)
            if self.changes.expected:
                self.changes.compare(unit, beside=False)
        self._end_use(unit)

    def gather_beside(self, index: int) -> None:
        """Gather a unit into extra memory beside its slot, since something reads it outside of its own forward.

        The slot can't be used, because other units are gathered into it while the values are needed. Gathers into the
        slot still go on: views that autograd saved in the unit's own forward are valid only there. See `free_beside`.
        """
        unit = self._storage.units[index]
        if self._slots[index] is None or unit.gathered_beside:
            return
        if index in self._written or self._updates.is_pending(index):
            self._await_written(index)
        # Write after read: the memory comes from torch's allocator, and compute may still use it for something else.
        self._streams.wait(Stream.GATHER, self._streams.record(Stream.COMPUTE, ("beside", index)))
        unit.gathered_beside = True
        wholes = [group.allocate_beside() for group in unit.groups]
        try:
            outdated = self._ledger.take_outdated(index)
            self._run_gather(unit, self._gather_steps.into(unit, wholes, ("beside", index), outdated))
        except (RuntimeError, AssertionError) as error:  # the memory was not written, so it must not be shown
            self._ledger.copy_outdated(index)
            unit.free_beside()
            refuse_tracing(error)
            raise
        # Read after write: the gather must have finished.
        self._streams.wait(Stream.COMPUTE, self._streams.record(Stream.GATHER, ("beside", index)))
        self._streams.touch(reads=(("beside", index),))
        unit.show()
        if self.changes.active:
            self.changes.record(unit, beside=True)

    def free_beside(self) -> None:
        """Free the extra memory of all units: nothing reads them outside of their own forward any more."""
        for unit in self._storage.units:
            if unit.gathered_beside:
                if self.changes.expected:
                    self.changes.compare(unit, beside=True)
                unit.free_beside()

    def resting(self) -> Hashable:
        """Which units are gathered, in use or awaited; from equal values the same operations follow."""
        in_use = tuple(unit.index for unit in self._storage.units if unit.in_use)
        return self._ledger.state(), in_use, tuple(self._gathered), tuple(self._written), self._gathers_since_write

    def release_all(self) -> None:
        """Release every sharded unit in use, as after a forward that an exception ended."""
        self.changes.forget()
        self.free_beside()
        for unit in self._storage.units:
            if unit.in_use:
                self._end_use(unit)

    def _await_written(self, index: int) -> None:
        """Read after write: the optimizer's step must have written the shards.

        The first gathers wait for the update of their own unit. Later gathers come when compute has passed the whole
        step anyway, so one wait for the last unit covers all. A captured graph may leave no wait to the next forward.
        """
        if self._updates.is_pending(index):
            self._written[index] = self._updates.finish(index)
        self._gathers_since_write = min(self._gathers_since_write + 1, self._separate_waits + 1)
        if self._gathers_since_write <= self._separate_waits or self.wait_per_unit:
            self._streams.wait(Stream.GATHER, self._written.pop(index))
        else:
            self._streams.wait(Stream.GATHER, self._written[next(reversed(self._written))])
            self._written.clear()
        if self._peers is not None:
            # The same hazard on the peers: the optimizers of all ranks must have written their shards.
            self._streams.launch(Stream.GATHER, self._peer_barrier, (), (self._buffer(index),))

    def _peer_barrier(self) -> Pending:
        assert self._peers is not None
        return self._peers.barrier(Channel.GATHER)

    def _end_use(self, unit: Unit) -> None:
        """End the use of a unit; its slot keeps the values for a later use where the plan reuses slots."""
        self._ledger.release(unit.index)
        if not self._ledger.holds(unit.index):
            self._hide_values(unit, self._slots[unit.index], UnitState.RESTING)
        elif unit.state is not UnitState.GATHERING:
            self._hide_values(unit, self._slots[unit.index], UnitState.GATHERED)

    def _hide_values(self, unit: Unit, slot: int | None, state: UnitState) -> None:
        """Let the unit's parameters no longer show values, and record when compute has passed this point."""
        showed = unit.in_use
        unit.become(state)
        if slot is None or not showed:
            return
        if not unit.gathered_beside:
            unit.hide()
        self._streams.touch(reads=self._used(unit.index))
        self._free[slot] = self._streams.record(Stream.COMPUTE, ("free", slot))

    def before_write(self) -> None:
        """Prepare for writes to the shards: release all units, and wait until nothing reads them."""
        self.finish_updates()
        self.release_all()
        self.wait_for_gathers()
        self._reads.drop()
        if self._peers is not None:
            # Write after read: the gathers of the peers must have read the shards.
            self._gathers[self._mesh.names].wait(self._peers.barrier(Channel.WRITE))

    def mark_written(self, in_parts: Iterable[int] | None = None, *, stepped: bool = True) -> None:
        """Record that shards were written on the compute stream; values that were gathered before are out of date.

        Args:
            in_parts: units that rest whole and of which each rank wrote only its part; None for those of a step.
            stepped: see SlotLedger.invalidate.
        """
        coded: Sequence[int] = ()
        if self.scaled is not None:
            self.scaled.refresh()
            coded = self.scaled.in_parts if in_parts is not None else ()
        for unit in self._storage.units:
            if not self._updates.is_pending(unit.index):
                self.mark_unit_written(unit.index)
        self.invalidate(in_parts if in_parts is None else {*in_parts, *coded}, stepped=stepped)
        for index in coded:  # these units rest whole, so all ranks need the codes of all parts
            self.gather(index)
        if coded:
            self.issue_peer_barrier()
            self.wait_for_gathers(resting_only=True)

    def mark_all_updated(self) -> None:
        """The optimizer has updated all units, after a `mark_unit_written` for each."""
        if self.scaled is not None:
            self.scaled.refresh()
            for index in self.scaled.units:
                self.mark_unit_written(index)

    def mark_unit_written(self, index: int, stream: Stream = Stream.COMPUTE) -> None:
        """Record that a unit's shards were written on a stream; call `invalidate` before it is gathered again."""
        if stream is Stream.COMPUTE:
            self._streams.touch(writes=written_buffers(index))
        self._written.pop(index, None)  # so that the last one of the dict is the last one written
        self._written[index] = self._streams.record(stream, ("written", index))

    def finish_updates(self) -> None:
        """Finish the pending updates: later work of compute comes after them."""
        for index in self._updates.units:
            event = self._updates.finish(index)
            self._streams.wait(Stream.COMPUTE, event)
            self._written[index] = event

    def invalidate(self, in_parts: Iterable[int] | None = None, *, stepped: bool = True) -> None:
        """Mark all gathered values as out of date; arguments as in `mark_written`."""
        self._gathers_since_write = 0
        self.changes.forget()
        self.free_beside()
        for unit in self._storage.units:
            slot = self._slots[unit.index]
            if self._streams.poisons and slot is not None:
                self._streams.touch(writes=(self._buffer(unit.index),))
                self._poison(unit.index)
                self._free[slot] = self._streams.record(Stream.COMPUTE, ("free", slot))
        self._ledger.invalidate(in_parts, stepped=stepped)
        for unit in self._storage.units:
            if not self._ledger.holds(unit.index) and (unit.rests_whole or not unit.in_use):
                unit.become(UnitState.RESTING)

    def wait_for_gathers(self, *, resting_only: bool = False) -> None:
        """Let compute wait for every running gather, or only for those of units that rest whole.

        Write after read: a gather reads its shard until it has finished. Readers outside of a forward need the wait,
        too: afterwards parameters that rest whole are current.
        """
        for index in list(self._gathered):
            if not resting_only or self._slots[index] is None:
                self._land(index)
        if self._passed_barrier is not None:
            self._streams.wait(Stream.COMPUTE, self._passed_barrier)
            self._passed_barrier = None

    def wait_for_disk_reads(self) -> None:
        """Wait for reads from disk; what they have read may still serve the next gathers."""
        self._reads.wait_for_reader()

    def issue_peer_barrier(self) -> None:
        """Issue a barrier after the gathers that follow a write; then parameters that rest whole may be changed."""
        if self._await_barrier:
            # Write after read: the peers' gathers copy from these parameters until all ranks reach the barrier.
            self._streams.launch(
                Stream.GATHER, self._peer_barrier, tuple(self._buffer(index) for index in self._await_barrier)
            )
            self._passed_barrier = self._streams.record(Stream.GATHER, "met")
            self._await_barrier.clear()

    def _land(self, index: int) -> None:
        """Let compute wait for a gather. Raises UsageError if whole parameters were changed meanwhile."""
        self._streams.wait(Stream.COMPUTE, self._gathered.pop(index))
        unit = self._storage.units[index]
        if unit.state is UnitState.GATHERING:  # else a write came meanwhile, and the values are out of date
            unit.become(UnitState.GATHERED)
        if self._versions.pop(index, None) not in (None, _versions(unit)):
            raise UsageError(
                f"parameters of unit {unit.label!r} were changed while their all-gather after the step was in flight, "
                "which undoes a part of the change; call zeroshard.drain(model) first, or change them inside "
                "zeroshard.GatheredParameters(parameters, modifier_rank=0)"
            )

    def _poison(self, index: int) -> None:
        for group in self._storage.units[index].groups:
            group.whole.fill_(math.nan)

    def _used(self, index: int) -> Buffers:
        """What compute reads while it uses a unit."""
        in_shard = any(group.in_shard for group in self._storage.units[index].groups)
        return (self._buffer(index), ("shard", index)) if in_shard else (self._buffer(index),)

    def _buffer(self, index: int) -> tuple[str, int]:
        slot = self._slots[index]
        return ("whole", index) if slot is None else ("slot", slot)


def _all_in_gathered_block(unit: Unit) -> bool:
    """Whether an open GatheredParameters holds all parameters of the unit, so that there is nothing to gather.

    In a backward the answer is no: its graph may have views of the slot, from a forward before that block.
    """
    sent = [group for group in unit.groups if group.plan.is_gathered]
    return bool(sent) and all(len(group.opened) == len(group.parameters) for group in sent) and not in_backward()


def written_buffers(index: int) -> tuple[Hashable, ...]:
    """The buffers that an update of a unit writes: its shards, which are a part of the whole if that rests."""
    return (("shard", index), ("whole", index))


def _versions(unit: Unit) -> list[int]:
    return [holder._version for group in unit.groups for holder in group.holders]
