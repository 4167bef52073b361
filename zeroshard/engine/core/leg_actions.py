"""Turns the reduce legs of a group into functions that issue work on streams, once for each plan.

The plan has the lists of legs (see plan.legs). Here each leg becomes a function of the values that change from one
backward to the next (`BackwardArgs`), with the waits for the wire slot in between:

    write after read    before compute writes to the slot, it waits for the event after the slot's last reduce
    read after write    before the first leg beside compute, the reduce stream waits for what compute has written

Rejected: looking at the kind of each leg while a backward runs, which costs host time in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.oplog import OperationLog
from zeroshard.engine.core.coded_sums import CodedSums
from zeroshard.engine.core.collect import Collector
from zeroshard.engine.core.leg_context import IN_EXCHANGE, IN_SLOT, Action, BackwardArgs, LegContext
from zeroshard.engine.core.peer_reduce import PeerReduce
from zeroshard.engine.core.squares import Squares
from zeroshard.engine.core.streams import Buffers, Event, Streams
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.unit import Unit
from zeroshard.engine.memory.update_view import own_grad
from zeroshard.mesh import Axes
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.legs import Buffer, Leg, LegKind, Legs, Route, Stream

_OF_THE_SLOT = frozenset({Buffer.WIRE, Buffer.WIRE_PART, Buffer.STAGING, Buffer.LATE, Buffer.LATE_PART})
"""Buffers that are there, with the dtype and size of a leg, when its action is made."""


class LegActions:
    """Makes the actions of one plan, and owns the memory of its reduce slots.

    Args:
        slots: the reduce slot of each unit.
        reduces: the reduce communicators, by mesh axes.
        log: what this rank issues, in the order of the lists (a queue may start it later).
        peers: reduces by copies between peers; None if ranks reduce by collectives.
        predivide: the divisor of gradients before they are summed.
        exchange: memory for quantized reduces; None if there are none.
    """

    def __init__(
        self,
        slots: tuple[int | None, ...],
        collector: Collector,
        squares: Squares,
        streams: Streams,
        reduces: Mapping[Axes, Collectives],
        log: OperationLog,
        peers: PeerReduce | None,
        predivide: float,
        exchange: torch.Tensor | None,
    ) -> None:
        self._slots, self._collector, self._squares = slots, collector, squares
        self._streams, self._reduces, self._log = streams, reduces, log
        self._peers, self._predivide = peers, predivide
        self._free: dict[int, Event] = {}
        self._sums = sums = CodedSums(streams, reduces, log, exchange)
        self._makers: dict[LegKind, Callable[[Leg, LegContext], Action]] = {
            LegKind.COLLECT: self._collect,
            LegKind.CAST: self._cast,
            LegKind.DIVIDE: self._divide,
            LegKind.REDUCE_SCATTER: self._reduce_scatter,
            LegKind.ALL_REDUCE: self._all_reduce,
            LegKind.ALL_GATHER: self._all_gather,
            LegKind.SQUARE: self._square,
            LegKind.LAND: self._land,
            LegKind.COPY: self._copy,
            LegKind.ENCODE: sums.encode,
            LegKind.ALL_TO_ALL: sums.exchange,
            LegKind.SUM: sums.sum,
        }

    def bind(
        self, unit: Unit, group: Group, legs: Legs, others: Mapping[Buffer, torch.Tensor] | None = None
    ) -> list[Action]:
        """The actions of a list of legs, in order.

        Args:
            others: buffers that the group itself does not have.
        """
        slot = self._slots[unit.index]
        context = LegContext(unit, group, legs, slot, partial(self._tensor, group, others or {}))
        through_slot = any(leg.source in IN_SLOT and _leaves_slot(leg) for leg in legs)
        actions: list[Action] = []
        entered = beside = False
        for leg in legs:
            if leg.target is Buffer.WIRE and leg.stream is Stream.COMPUTE and slot is not None and not entered:
                actions.append(partial(self._wait_for_slot, slot))
                entered = True
            if leg.stream is Stream.REDUCE and not beside:
                if leg.route is Route.COLLECTIVE:  # PeerReduce, which copies, waits itself
                    actions.append(partial(self._wait_for_compute, context.names(leg.source)))
                beside = True
            _check_memory(leg, context)
            actions.append(self._makers[leg.kind](leg, context))
        if through_slot:
            actions.append(partial(self._leave_slot, context))
        return actions

    def _tensor(self, group: Group, others: Mapping[Buffer, torch.Tensor], buffer: Buffer) -> torch.Tensor:
        if buffer is Buffer.LOCAL:
            return self._collector.local(group)
        if buffer is Buffer.GRAD:
            group.take_grad()
            return own_grad(group)
        if buffer in others:
            return others[buffer]
        if buffer is Buffer.WIRE_PART:
            return group.wire_part
        if buffer in IN_EXCHANGE:
            return self._sums.tensor(group, buffer)
        found = group.wire if buffer is Buffer.WIRE else group.staging
        assert found is not None
        return found

    # Between legs.

    def _wait_for_slot(self, slot: int, _: BackwardArgs) -> None:
        event = self._free.get(slot)
        if event is not None:
            # Write after read: the reduce of the last unit in the slot must have finished.
            self._streams.wait(Stream.COMPUTE, event)

    def _wait_for_compute(self, written: Buffers, _: BackwardArgs) -> None:
        self._streams.touch(writes=written)
        # Read after write: compute must have collected the gradients.
        self._streams.wait(Stream.REDUCE, self._streams.record(Stream.COMPUTE, "collected"))

    def _leave_slot(self, context: LegContext, _: BackwardArgs) -> None:
        if self._streams.poisons:
            wire = context.tensor(Buffer.WIRE)
            self._streams.enqueue(Stream.REDUCE, lambda: wire.fill_(math.nan), (), (("wire", context.slot),))
        if context.slot is not None:
            self._free[context.slot] = self._streams.record(Stream.REDUCE, ("wire", context.slot))

    # On compute.

    def _collect(self, leg: Leg, context: LegContext) -> Action:
        collect, group, peers = self._collector.collect, context.group, self._peers
        if leg.target is not Buffer.LOCAL:
            target = context.tensor(leg.target)
            return lambda args: collect(group, args.received, target, fresh=True, factor=args.factor)

        def into_local(args: BackwardArgs) -> None:
            if peers is not None:
                # Write after read: the buffer of local gradients may still be the source of copies to peers.
                peers.release_sent()
            collect(group, args.received, self._collector.local(group), fresh=args.fresh, factor=args.factor)

        return into_local

    def _cast(self, leg: Leg, context: LegContext) -> Action:
        if leg.stream is Stream.COMPUTE:
            return lambda _: context.tensor(leg.target).copy_(context.tensor(leg.source))
        source, reads, writes = context.tensor(leg.source), context.names(leg.source), context.names(leg.target)

        def beside(_: BackwardArgs) -> None:
            target = context.tensor(leg.target)
            self._streams.enqueue(leg.stream, lambda: target.copy_(source), reads, writes)

        return beside

    def _divide(self, leg: Leg, context: LegContext) -> Action:
        return lambda _: context.tensor(leg.source).div_(self._predivide)

    # Beside compute.

    def _reduce_scatter(self, leg: Leg, context: LegContext) -> Action:
        if leg.route is Route.COPIES:
            return self._by_copies(leg, context)
        collectives, label, nbytes = self._reduces[leg.axes], context.unit.label, leg.nbytes
        reads, writes = context.names(leg.source), context.names(leg.source, leg.target, Buffer.GRAD)

        def send(_: BackwardArgs) -> None:
            self._log.record("reduce-scatter", label, nbytes)
            source, landing = context.tensor(leg.source), context.tensor(leg.target)
            self._streams.launch(leg.stream, lambda: collectives.reduce_scatter(landing, source, label), reads, writes)

        return send

    def _by_copies(self, leg: Leg, context: LegContext) -> Action:
        """Send to the peers; the last sum of a group also computes the squares for the norm."""
        peers, unit, group, slot = self._peers, context.unit, context.group, context.slot
        assert peers is not None
        last = leg.target is Buffer.GRAD and leg is context.legs[-1]

        def send(args: BackwardArgs) -> None:
            if leg.source is Buffer.AUTOGRAD:
                sources = self._collector.take(group, args.received, args.factor)
            else:
                sources = self._collector.views(group, context.tensor(leg.source))
            landing = context.tensor(leg.target)
            squares = self._squares.beside_sum(group) if last else None
            peers.reduce(unit, group, slot, sources, landing, add=leg.adds and args.add, squares=squares)

        return send

    def _all_reduce(self, leg: Leg, context: LegContext) -> Action:
        collectives, label, nbytes = self._reduces[leg.axes], context.unit.label, leg.nbytes
        writes = context.names(leg.target, Buffer.GRAD)

        def send(_: BackwardArgs) -> None:
            self._log.record("all-reduce", label, nbytes)
            part = context.tensor(leg.target)
            self._streams.launch(leg.stream, lambda: collectives.all_reduce(part, label), (), writes)

        return send

    def _all_gather(self, leg: Leg, context: LegContext) -> Action:
        collectives, label, nbytes = self._reduces[leg.axes], context.unit.label, leg.nbytes
        reads, writes = context.names(leg.target), context.names(leg.target, leg.source, Buffer.GRAD)

        def send(_: BackwardArgs) -> None:
            self._log.record("all-gather", label, nbytes)
            whole, part = context.tensor(leg.target), context.tensor(leg.source)
            self._streams.launch(leg.stream, lambda: collectives.all_gather(whole, part, label), reads, writes)

        return send

    def _square(self, leg: Leg, context: LegContext) -> Action:
        squares, source = self._squares.of(context.group), context.tensor(leg.source)
        buffers = context.names(leg.source), context.names(Buffer.GRAD)

        def square() -> None:
            squares.norm.square(0, source)
            squares.norm.into(squares.total)

        return lambda _: self._streams.enqueue(leg.stream, square, *buffers)

    def _land(self, leg: Leg, context: LegContext) -> Action:
        source, buffers = context.tensor(leg.source), (context.names(leg.source), context.names(leg.target))

        def land(args: BackwardArgs) -> None:
            target = context.tensor(leg.target)
            put = target.add_ if args.add else target.copy_
            self._streams.enqueue(leg.stream, lambda: put(source), *buffers)

        return land

    def _copy(self, leg: Leg, context: LegContext) -> Action:
        source, buffers = context.tensor(leg.source), (context.names(leg.source), context.names(leg.target))

        def copy(_: BackwardArgs) -> None:
            target = context.group.grad
            assert target is not None
            self._streams.enqueue(leg.stream, lambda: target.copy_(source, non_blocking=True), *buffers)

        return copy


def _check_memory(leg: Leg, context: LegContext) -> None:
    """Traffic and clocks are counted from legs, so the memory has to be what they say."""
    sends = bool(leg.axes) and leg.route is Route.COLLECTIVE
    for buffer, dtypes in ((leg.source, (leg.read, leg.dtype) if sends else (leg.read,)), (leg.target, (leg.dtype,))):
        if buffer in _OF_THE_SLOT:
            found = context.tensor(buffer)
            assert all(found.dtype is torch_dtype(dtype) for dtype in dtypes), (leg, found.dtype)
            whole = buffer in (Buffer.WIRE, Buffer.LATE)
            assert found.numel() == leg.numel if whole else found.numel() <= leg.numel, (leg, found.numel())


def _leaves_slot(leg: Leg) -> bool:
    """Whether the leg reads gradients from the slot on the reduce stream. PeerReduce orders its own reads."""
    return leg.kind is LegKind.ENCODE or (leg.route is Route.COLLECTIVE and bool(leg.axes))
