"""Legs: what a gather or a reduce of one flat group is made of, in order. The one place that knows.

    refresh   [copy SHARD -> SECOND]     all-gather SHARD -> SECOND        where subgroups have a second copy
    follow    differ SHARD -> RECORDS    all-gather, add -> SECOND         after a step, where only differences are sent
    gather    [[read SHARD -> WINDOW]  copy -> WHOLE]      all-gather SHARD (or SECOND) -> WHOLE
    keep      collect AUTOGRAD -> LOCAL                                    gradients wait for a later reduce
    pending   [cast LOCAL -> WIRE]       reduce-scatter ... [all-reduce ...] [land | copy | all-gather]
              [cast LOCAL -> WIRE]       encode, all-to-all, sum; twice where there are two hops    sums in codes
    reduce    collect AUTOGRAD -> WIRE, then as pending; or keep, then pending, where gradients rest whole

The engine turns the lists into calls, the traffic count adds their payloads up, and the planner's clocks add their
seconds up; all three read the same list object (`Plan.legs`). Whatever travels another way (in another dtype, over a
second axis, to another tier) is another leg here. Rejected: to let the engine decide from the placements while it runs;
the traffic count and the clocks then decide a second and a third time, and differ where nobody looks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from zeroshard.mesh import Axes
from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.groups import GroupPlan, SecondCopy, UnitPlan
from zeroshard.plan.hops import ERROR_DTYPE, SUM_DTYPE
from zeroshard.plan.placement import Tier
from zeroshard.sharding.slots import Outdated


class Stream(Enum):
    """Who runs beside whom."""

    COMPUTE = 0
    GATHER = 1
    REDUCE = 2
    UPLOAD = 3
    """From host memory to the device."""
    UPDATE = 4
    """State that rests in host memory is updated while it is on the device."""
    DOWNLOAD = 5
    """From the device to host memory."""


class LegKind(str, Enum):
    """What a leg does with its source."""

    COLLECT = "collect"
    """Gradients leave their parameters, over what the target holds or added to it."""
    ENCODE = "encode"
    """The source is written as codes and scales; of gradients with what the last rounding left out added before."""
    DECODE = "decode"
    """And read from these."""
    DIFFER = "differ"
    """What the second copy lacks to be as the source is written as codes and scales."""
    ADD = "add"
    """And added to the second copy."""
    SUM = "sum"
    """What the codes of several ranks stand for is summed in float32."""
    CAST = "cast"
    """The whole is copied, into the dtype of the target."""
    DIVIDE = "divide"
    """The source is divided in place, before it is summed over ranks."""
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    SQUARE = "square"
    """The squares of the source are summed, while it is on the device."""
    LAND = "land"
    """This rank's reduced part is copied to where it rests, or added to what rests there."""
    COPY = "copy"
    """Between device and host memory."""
    READ = "read"
    """From disk into host memory; begun by an operation of its own, which the list has before the gather."""


class Buffer(str, Enum):
    """Where a leg reads or writes."""

    SHARD = "shard"
    """This rank's part of the parameters."""
    WINDOW = "window"
    """This rank's part of the parameters in host memory, on its way from disk."""
    WHOLE = "whole"
    """All of the parameters, in compute dtype."""
    SECOND = "second"
    """This rank's part of the second copy of the parameters; of those that rest whole it is a part of WHOLE."""
    RECORDS = "records"
    """Shards in codes, this rank's or those of all that a gather brings."""
    AUTOGRAD = "autograd"
    """The parameters' gradients as autograd leaves them."""
    LOCAL = "local"
    """This rank's whole gradients, until they are reduced."""
    WIRE = "wire"
    """Whole gradients in wire dtype, in the reduce slot."""
    WIRE_PART = "wire part"
    """The part of WIRE of which this rank holds the sum over its subgroup, before it is summed between subgroups."""
    STAGING = "staging"
    """This rank's part of the reduced gradients, beside WIRE in the slot."""
    GRAD = "grad"
    """Where this rank's part of the reduced gradients rests."""
    CODES = "codes"
    """Gradients in codes, a record for each rank of a hop."""
    ARRIVED = "arrived codes"
    """The records that all ranks of a hop have for this one."""
    MIDDLE = "middle"
    """This rank's part of the sum over its subgroup, in float32, between two hops."""
    LATE = "late"
    """Whole gradients that came after those of their unit were reduced."""
    LATE_PART = "late part"
    """This rank's reduced part of these."""


class Route(str, Enum):
    """How a collective reaches the other ranks."""

    COLLECTIVE = "collective"
    COPIES = "copies"
    """Between memory that all ranks of the axis reach; sums are made by the rank that keeps them."""


@dataclass(frozen=True)
class Leg:
    """One stretch of the way.

    Attributes:
        numel: elements of the larger side: an all-gather's output, a reduce-scatter's input.
        dtype: in which they travel, or arrive.
        read: dtype of the source.
        stream: where the leg runs.
        axes: mesh axes over which ranks take part; () for a leg that sends nothing.
        adds: the target may hold something to which the leg adds.
        route: of legs that send.
        hop: of sums in codes, which one the leg belongs to.
        besides: bytes of codes, scales and errors that the leg reads and writes besides its elements.
    """

    kind: LegKind
    source: Buffer
    target: Buffer
    numel: int
    dtype: str
    read: str
    stream: Stream
    axes: Axes = ()
    adds: bool = False
    route: Route = Route.COLLECTIVE
    hop: int = 0
    besides: int = 0

    @property
    def nbytes(self) -> int:
        """Payload, in bytes."""
        return self.numel * itemsize(self.dtype)

    @property
    def moved_nbytes(self) -> int:
        """Bytes that the leg reads and writes in the memory of its device."""
        if self.besides:  # codes on one side, elements on the other
            return self.besides + self.numel * itemsize(self.read) * (2 if self.adds else 1)
        return self.numel * (itemsize(self.read) + (2 if self.adds else 1) * itemsize(self.dtype))


Legs = tuple[Leg, ...]
_BYTES = ("uint8", "uint8")


@dataclass(frozen=True)
class GroupLegs:
    """The legs of one flat group.

    Attributes:
        refresh: from the shards to the second copies; () where there are none.
        follow: from the shards to second copies that are those of the step before; () where they are made anew.
        gather: from the shards or the second copies to the whole parameters; () where nothing moves.
        keep: from autograd to whole local gradients.
        pending: from whole local gradients to where reduced ones rest.
        reduce: from autograd to where reduced ones rest, with no local gradients before.
        late: from gradients that came late to where those of the unit rest.
        divided: reduced gradients rest in parts, so that each backward may reduce.
    """

    gather: Legs = ()
    keep: Legs = ()
    pending: Legs = ()
    reduce: Legs = ()
    late: Legs = ()
    divided: bool = False
    refresh: Legs = ()
    follow: Legs = ()

    def renewal(self, outdated: Outdated, *, trainable: bool) -> Legs:
        """What makes the second copy current."""
        if not outdated.covers(trainable):
            return ()
        return self.follow if self.follow and outdated is Outdated.TRAINABLE else self.refresh

    @property
    def reads(self) -> Legs:
        """What of a gather comes from disk."""
        return tuple(leg for leg in (*self.refresh, *self.gather) if leg.kind is LegKind.READ)


@dataclass(frozen=True)
class Ways:
    """What lowering needs to know beside the group: how ranks reach each other, and what is done before sums."""

    copies: bool
    accumulate: bool
    divides: bool


def lower(unit: UnitPlan, group: GroupPlan, ways: Ways) -> GroupLegs:
    """The legs of a group of `unit`."""
    (refresh, gather), follow = _gathers(unit, group, ways), _follow(unit, group)
    if group.grad is None:
        return GroupLegs(gather, refresh=refresh)
    axes, wire, whole = unit.axes_of(group), group.wire, group.layout.numel
    local = local_dtype(group, ways.accumulate)
    keep = (_collect(group, Buffer.LOCAL, local, adds=True),)
    divided = group.grad.divided
    if group.needs_reduce_slot and ways.copies:
        sent = [_sent_by_copies(unit, group, source) for source in (Buffer.LOCAL, Buffer.AUTOGRAD)]
        rest = _rest_of_copies(unit, group)
        pending, direct = ((leg, *rest) for leg in sent)
    elif group.needs_reduce_slot:
        rest = (*_divide(ways, Buffer.WIRE, whole, wire), *_through_slot(unit, group))
        cast = Leg(LegKind.CAST, Buffer.LOCAL, Buffer.WIRE, whole, wire, local, Stream.COMPUTE)
        pending = (cast, *rest)
        direct = (_collect(group, Buffer.WIRE, wire), *rest)
    else:
        landed = _reduced(unit, group, Buffer.LOCAL, Buffer.GRAD)
        pending = (*_divide(ways, Buffer.LOCAL, whole, wire), *landed, *_shared(group, axes, Buffer.GRAD, Buffer.LOCAL))
        direct = ()
    late = (
        _collect(group, Buffer.LATE, wire),
        *_divide(ways, Buffer.LATE, whole, wire),
        *_reduced(unit, group, Buffer.LATE, Buffer.LATE_PART),
        *_shared(group, axes, Buffer.LATE_PART, Buffer.LATE),
    )
    reduce = direct if divided else (*keep, *pending)
    return GroupLegs(gather, keep, pending, reduce, late, divided, refresh, follow)


def local_dtype(group: GroupPlan, accumulate: bool) -> str:
    """The dtype of whole local gradients: never narrower than the wire, so that waiting is no less exact."""
    assert group.grad is not None
    kept, wire = group.grad.dtype, group.wire
    if not group.grad.divided:
        return kept
    widest = kept if itemsize(kept) >= itemsize(wire) else wire
    if accumulate or itemsize(widest) >= itemsize("float32"):
        return widest
    return "float32"  # such gradients are not meant to be added to


def _gathers(unit: UnitPlan, group: GroupPlan, ways: Ways) -> tuple[Legs, Legs]:
    """What makes the second copy, if there is one, and what gathers the whole."""
    if not group.travels:
        return (), ()
    first = Buffer.WHOLE if group.second is None else Buffer.SECOND
    up, source = _brought_up(group, first)
    if group.second is None:
        route = Route.COPIES if ways.copies else Route.COLLECTIVE
        return (), (*up, *_shards_gathered(group, source, first, group.layout.numel, unit.axes_of(group), route))
    outer = unit.axes[len(group.second.axes) :]
    refresh = (*up, *_shards_gathered(group, source, first, group.second_numel, outer))
    whole = _all_gather(group, first, Buffer.WHOLE, group.layout.numel, group.second.axes)
    # Parameters that rest whole are gathered once after a step, so that both belong together.
    return (refresh, (whole,)) if group.param.divided else ((), (*refresh, whole))


def _follow(unit: UnitPlan, group: GroupPlan) -> Legs:
    """What brings second copies from one step to the next: the difference, which is small, in few bits."""
    if group.differences is None or group.second is None:
        return ()
    # The second copy is needed as it is; the whole is gathered right after, so that its place is free.
    up, source = _brought_up(group, Buffer.WHOLE)
    record, dtype, stream = group.record_of(group.differences), group.param.dtype, Stream.GATHER
    there, nbytes = record + group.layout.shard_numel * itemsize(dtype), record * group.records
    records, second, outer = Buffer.RECORDS, Buffer.SECOND, unit.axes[len(group.second.axes) :]
    return (
        *up,
        Leg(LegKind.DIFFER, source, records, group.layout.shard_numel, "uint8", dtype, stream, besides=there),
        Leg(LegKind.ALL_GATHER, records, records, nbytes, *_BYTES, stream, outer),
        Leg(LegKind.ADD, records, second, group.second_numel, dtype, dtype, stream, adds=True, besides=nbytes),
    )


def _brought_up(group: GroupPlan, target: Buffer) -> tuple[Legs, Buffer]:
    """What brings a shard to the device, into its place in the target, and where it is then."""
    if group.param.tier is Tier.DEVICE:
        return (), Buffer.SHARD
    numel, dtype = group.layout.shard_numel, group.param.dtype
    if group.param.tier is not Tier.NVME:
        return (Leg(LegKind.COPY, Buffer.SHARD, target, numel, dtype, dtype, Stream.GATHER),), target
    return (
        Leg(LegKind.READ, Buffer.SHARD, Buffer.WINDOW, numel, dtype, dtype, Stream.GATHER),
        Leg(LegKind.COPY, Buffer.WINDOW, target, numel, dtype, dtype, Stream.GATHER),
    ), target


def _shards_gathered(
    group: GroupPlan, source: Buffer, target: Buffer, numel: int, axes: Axes, route: Route = Route.COLLECTIVE
) -> Legs:
    """A gather of shards, in codes where the plan says so."""
    if group.codes is None:
        return (_all_gather(group, source, target, numel, axes, route),)
    record = group.record_of(group.codes)
    dtype, shard, nbytes = group.param.dtype, group.layout.shard_numel, record * group.records
    records, stream = Buffer.RECORDS, Stream.GATHER
    return (
        Leg(LegKind.ENCODE, source, records, shard, "uint8", dtype, stream, besides=record),
        Leg(LegKind.ALL_GATHER, records, records, nbytes, "uint8", "uint8", stream, axes),
        Leg(LegKind.DECODE, records, target, numel, dtype, dtype, stream, besides=nbytes),
    )


def _all_gather(
    group: GroupPlan, source: Buffer, target: Buffer, numel: int, axes: Axes, route: Route = Route.COLLECTIVE
) -> Leg:
    dtype = group.param.dtype
    return Leg(LegKind.ALL_GATHER, source, target, numel, dtype, dtype, Stream.GATHER, axes, route=route)


def _collect(group: GroupPlan, target: Buffer, dtype: str, *, adds: bool = False) -> Leg:
    numel, read = group.layout.numel, group.param.dtype
    return Leg(LegKind.COLLECT, Buffer.AUTOGRAD, target, numel, dtype, read, Stream.COMPUTE, adds=adds)


def _divide(ways: Ways, buffer: Buffer, numel: int, dtype: str) -> Legs:
    return (Leg(LegKind.DIVIDE, buffer, buffer, numel, dtype, dtype, Stream.COMPUTE),) if ways.divides else ()


def _through_slot(unit: UnitPlan, group: GroupPlan) -> Legs:
    """From the wire slot to where reduced gradients rest."""
    assert group.grad is not None
    landing = Buffer.STAGING if group.staged and not group.summed_in_place else Buffer.GRAD
    sent = _reduced(unit, group, Buffer.WIRE, landing)
    if not group.update_axes:
        numel, kept = group.layout.numel, group.grad.dtype
        back = Leg(LegKind.CAST, Buffer.WIRE, Buffer.LOCAL, numel, kept, group.wire, Stream.REDUCE)
        return (*sent, *_shared(group, unit.axes_of(group), landing, Buffer.WIRE), back)
    return (*sent, *_landed(group, landing))


def _sent_by_copies(unit: UnitPlan, group: GroupPlan, source: Buffer) -> Leg:
    """What the ranks copy to each other and sum: into the gradient itself, unless more is to be done with the sum."""
    landing = _landing_of_copies(unit, group)
    return replace(
        _reduce_scatter(unit, group, source, landing),
        adds=landing is Buffer.GRAD and group.staged,
        route=Route.COPIES,
    )


def _landing_of_copies(unit: UnitPlan, group: GroupPlan) -> Buffer:
    beside = group.grad_away or (group.staged and bool(replica_axes(unit, group)))
    return Buffer.STAGING if beside else Buffer.GRAD


def _rest_of_copies(unit: UnitPlan, group: GroupPlan) -> Legs:
    landing = _landing_of_copies(unit, group)
    return (*_over_replicas(unit, group, landing), *_landed(group, landing))


def _reduced(unit: UnitPlan, group: GroupPlan, source: Buffer, landing: Buffer) -> Legs:
    if group.hops and source is not Buffer.LATE:
        return _summed_in_codes(group, source, landing)
    if group.second is not None and source is Buffer.WIRE:
        return _reduced_twice(unit, group, group.second, landing)
    return (_reduce_scatter(unit, group, source, landing), *_over_replicas(unit, group, landing))


def _reduce_scatter(unit: UnitPlan, group: GroupPlan, source: Buffer, landing: Buffer) -> Leg:
    numel, wire = group.layout.numel, group.wire
    return Leg(LegKind.REDUCE_SCATTER, source, landing, numel, wire, wire, Stream.REDUCE, unit.axes_of(group))


def _reduced_twice(unit: UnitPlan, group: GroupPlan, second: SecondCopy, landing: Buffer) -> Legs:
    """Sums within each subgroup, then between them: only 1/parts of the gradients leaves a subgroup through a rank."""
    outer, wire = unit.axes[len(second.axes) :], group.wire
    return (
        replace(_reduce_scatter(unit, group, Buffer.WIRE, Buffer.WIRE_PART), axes=second.axes),
        Leg(LegKind.REDUCE_SCATTER, Buffer.WIRE_PART, landing, group.second_numel, wire, wire, Stream.REDUCE, outer),
    )


def _summed_in_codes(group: GroupPlan, source: Buffer, landing: Buffer) -> Legs:
    """Hop after hop: codes go to the ranks that keep the sums of what they stand for."""
    assert group.grad is not None
    found: list[Leg] = []
    read = group.grad.dtype if source is Buffer.LOCAL else group.wire
    last = len(group.hops) - 1
    for number, (hop, size) in enumerate(zip(group.hops, group.hop_sizes, strict=True)):
        target = landing if number == last else Buffer.MIDDLE
        kept = group.grad.dtype if target is Buffer.GRAD else group.wire if number == last else SUM_DTYPE
        codes, errors = size.nbytes, 2 * group.error_numels[number] * itemsize(ERROR_DTYPE)
        adds = target is Buffer.GRAD and group.staged
        there, back = codes + errors, codes
        found += [
            _coded(LegKind.ENCODE, source, Buffer.CODES, size.numel, "uint8", read, number, there),
            replace(_coded(LegKind.ALL_TO_ALL, Buffer.CODES, Buffer.ARRIVED, codes, *_BYTES, number), axes=hop.axes),
            replace(_coded(LegKind.SUM, Buffer.ARRIVED, target, size.landed, kept, kept, number, back), adds=adds),
        ]
        source, read = target, kept
    return tuple(found)


def _coded(
    kind: LegKind, source: Buffer, target: Buffer, numel: int, dtype: str, read: str, hop: int, besides: int = 0
) -> Leg:
    return Leg(kind, source, target, numel, dtype, read, Stream.REDUCE, hop=hop, besides=besides)


def _over_replicas(unit: UnitPlan, group: GroupPlan, part: Buffer) -> Legs:
    """What is divided over a part of the axes of its sums is summed over the rest too."""
    axes = replica_axes(unit, group)
    if not axes:
        return ()
    numel, wire = group.layout.shard_numel, group.wire
    return (Leg(LegKind.ALL_REDUCE, part, part, numel, wire, wire, Stream.REDUCE, axes),)


def replica_axes(unit: UnitPlan, group: GroupPlan) -> Axes:
    """The axes along which ranks hold the same part of the unit, but gradients of other data."""
    return tuple(axis for axis in group.sums if axis not in unit.axes_of(group))


def _shared(group: GroupPlan, axes: Axes, part: Buffer, whole: Buffer) -> Legs:
    """Where every rank updates everything, all get the reduced parts of all."""
    if group.update_axes:
        return ()
    wire = group.wire
    return (Leg(LegKind.ALL_GATHER, part, whole, group.layout.numel, wire, wire, Stream.REDUCE, axes),)


def _landed(group: GroupPlan, landing: Buffer) -> Legs:
    """From beside the slot to where reduced gradients rest."""
    assert group.grad is not None
    if landing is Buffer.GRAD:
        return ()
    numel, wire, kept = group.layout.shard_numel, group.wire, group.grad.dtype
    if group.grad_away:
        return (
            Leg(LegKind.SQUARE, landing, landing, numel, wire, wire, Stream.REDUCE),
            Leg(LegKind.COPY, landing, Buffer.GRAD, numel, kept, wire, Stream.REDUCE),
        )
    return (Leg(LegKind.LAND, landing, Buffer.GRAD, numel, kept, wire, Stream.REDUCE, adds=True),)
