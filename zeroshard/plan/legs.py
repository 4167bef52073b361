"""Legs: the steps of a gather or a reduce of one flat group, in order. Only this module decides them.

    refresh   [copy SHARD -> SECOND]     all-gather SHARD -> SECOND        if subgroups have a second copy
    differ.   differ SHARD -> RECORDS    all-gather, add -> SECOND         after a step, if only differences are sent
    gather    [[read SHARD -> WINDOW]  copy -> WHOLE]      all-gather SHARD (or SECOND) -> WHOLE
    keep      collect AUTOGRAD -> LOCAL                                    gradients wait for a later reduce
    pending   [cast LOCAL -> WIRE]       reduce-scatter ... [all-reduce ...] [land | copy | all-gather]
              [cast LOCAL -> WIRE]       encode, all-to-all, sum; twice for two hops            quantized gradients
    reduce    collect AUTOGRAD -> WIRE, then as pending; or keep, then pending, if gradients rest whole

The engine turns the lists into calls, the traffic count adds up their payloads, and the planner's clocks add up their
seconds; all three read the same list object (`Plan.legs`). Another way to send (another dtype, a second axis, another
tier) is another leg here. Rejected: decisions of the engine while it runs; the traffic count and the clocks would then
repeat them, and might differ from the engine without an error.
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
    """The streams of work that overlap."""

    COMPUTE = 0
    GATHER = 1
    REDUCE = 2
    UPLOAD = 3
    """Copies from host memory to the device."""
    UPDATE = 4
    """Updates of state that rests in host memory and is streamed through the device."""
    DOWNLOAD = 5
    """Copies from the device to host memory."""


class LegKind(str, Enum):
    """What a leg does with its source."""

    COLLECT = "collect"
    """Gradients are moved from the parameters to the target, which they overwrite or add to."""
    ENCODE = "encode"
    """The source is quantized to codes and scales; for gradients the last rounding error is added first."""
    DECODE = "decode"
    """Codes and scales are decoded."""
    DIFFER = "differ"
    """The difference between the source and the second copy is quantized to codes and scales."""
    ADD = "add"
    """Decoded differences are added to the second copy."""
    SUM = "sum"
    """The decoded values of several ranks are summed in float32."""
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
    """This rank's reduced part is copied to the resting gradient, or added to it."""
    COPY = "copy"
    """A copy between device and host memory."""
    READ = "read"
    """A read from disk into host memory; a separate operation before the gather starts it."""


class Buffer(str, Enum):
    """The buffers that legs read and write."""

    SHARD = "shard"
    """This rank's part of the parameters."""
    WINDOW = "window"
    """This rank's part of the parameters in host memory, after it was read from disk."""
    WHOLE = "whole"
    """All of the parameters, in compute dtype."""
    SECOND = "second"
    """This rank's part of the second copy of the parameters; of those that rest whole it is a part of WHOLE."""
    RECORDS = "records"
    """Shards as codes: this rank's, or those of all ranks of a gather."""
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
    """Gradients as codes, a record for each rank of a hop."""
    ARRIVED = "arrived codes"
    """The records that this rank received from all ranks of a hop."""
    MIDDLE = "middle"
    """This rank's part of the sum over its subgroup, in float32, between two hops."""
    LATE = "late"
    """Whole gradients that came after those of their unit were reduced."""
    LATE_PART = "late part"
    """This rank's reduced part of LATE."""


class Route(str, Enum):
    """How a collective reaches the other ranks."""

    COLLECTIVE = "collective"
    COPIES = "copies"
    """Copies in memory that all ranks of the axis can access; the rank that keeps a sum computes it."""


@dataclass(frozen=True)
class Leg:
    """One step of a gather or a reduce.

    Attributes:
        numel: elements of the larger side: an all-gather's output, a reduce-scatter's input.
        dtype: dtype of the elements that are sent, or written.
        read: dtype of the source.
        stream: where the leg runs.
        axes: mesh axes over which ranks take part; () for a leg that sends nothing.
        adds: whether the leg may add to the target.
        route: how the leg sends, if it does.
        hop: the number of the hop, for legs of quantized reduces.
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
        refresh: makes second copies from the shards; () if there are none.
        by_differences: updates second copies of the step before, by differences; () if differences are not sent.
        gather: makes the whole parameters from the shards or the second copies; () if nothing moves.
        keep: moves gradients from autograd to whole local gradients.
        pending: reduces whole local gradients.
        reduce: reduces gradients of autograd, if there are no local ones.
        late: reduces gradients that arrived late.
        divided: reduced gradients rest in parts, so that each backward may reduce.
    """

    gather: Legs = ()
    keep: Legs = ()
    pending: Legs = ()
    reduce: Legs = ()
    late: Legs = ()
    divided: bool = False
    refresh: Legs = ()
    by_differences: Legs = ()

    def renewal(self, outdated: Outdated, *, trainable: bool) -> Legs:
        """The legs that bring the second copy up to date."""
        if not outdated.covers(trainable):
            return ()
        return self.by_differences if self.by_differences and outdated is Outdated.TRAINABLE else self.refresh

    @property
    def reads(self) -> Legs:
        """The legs of a gather that read from disk."""
        return tuple(leg for leg in (*self.refresh, *self.gather) if leg.kind is LegKind.READ)


@dataclass(frozen=True)
class LoweringOptions:
    """What lowering needs besides the group: copies between peers, accumulation, and division before sums."""

    copies: bool
    accumulate: bool
    divides: bool


def lower(unit: UnitPlan, group: GroupPlan, options: LoweringOptions) -> GroupLegs:
    """The legs of a group of `unit`."""
    (refresh, gather), by_differences = _gathers(unit, group, options), _by_differences(unit, group)
    if group.grad is None:
        return GroupLegs(gather, refresh=refresh)
    axes, wire, whole = unit.axes_of(group), group.wire, group.layout.numel
    local = local_dtype(group, options.accumulate)
    keep = (_collect(group, Buffer.LOCAL, local, adds=True),)
    divided = group.grad.divided
    if group.needs_reduce_slot and options.copies:
        sent = [_reduce_by_copies(unit, group, source) for source in (Buffer.LOCAL, Buffer.AUTOGRAD)]
        rest = _after_copies(unit, group)
        pending, direct = ((leg, *rest) for leg in sent)
    elif group.needs_reduce_slot:
        rest = (*_divide(options, Buffer.WIRE, whole, wire), *_reduce_through_slot(unit, group))
        cast = Leg(LegKind.CAST, Buffer.LOCAL, Buffer.WIRE, whole, wire, local, Stream.COMPUTE)
        pending = (cast, *rest)
        direct = (_collect(group, Buffer.WIRE, wire), *rest)
    else:
        landed = _reduce(unit, group, Buffer.LOCAL, Buffer.GRAD)
        pending = (
            *_divide(options, Buffer.LOCAL, whole, wire),
            *landed,
            *_gather_reduced(group, axes, Buffer.GRAD, Buffer.LOCAL),
        )
        direct = ()
    late = (
        _collect(group, Buffer.LATE, wire),
        *_divide(options, Buffer.LATE, whole, wire),
        *_reduce(unit, group, Buffer.LATE, Buffer.LATE_PART),
        *_gather_reduced(group, axes, Buffer.LATE_PART, Buffer.LATE),
    )
    reduce = direct if divided else (*keep, *pending)
    return GroupLegs(gather, keep, pending, reduce, late, divided, refresh, by_differences)


def local_dtype(group: GroupPlan, accumulate: bool) -> str:
    """The dtype of whole local gradients: never narrower than the wire, so that keeping them loses no precision."""
    assert group.grad is not None
    kept, wire = group.grad.dtype, group.wire
    if not group.grad.divided:
        return kept
    widest = kept if itemsize(kept) >= itemsize(wire) else wire
    if accumulate or itemsize(widest) >= itemsize("float32"):
        return widest
    return "float32"  # gradients in 16 bits are not precise enough to be added to


def _gathers(unit: UnitPlan, group: GroupPlan, options: LoweringOptions) -> tuple[Legs, Legs]:
    """The legs that make the second copy, if there is one, and those that gather the whole."""
    if not group.is_gathered:
        return (), ()
    first = Buffer.WHOLE if group.second is None else Buffer.SECOND
    up, source = _to_device(group, first)
    if group.second is None:
        route = Route.COPIES if options.copies else Route.COLLECTIVE
        return (), (*up, *_gather_shards(group, source, first, group.layout.numel, unit.axes_of(group), route))
    outer = unit.axes[len(group.second.axes) :]
    refresh = (*up, *_gather_shards(group, source, first, group.second_numel, outer))
    whole = _all_gather(group, first, Buffer.WHOLE, group.layout.numel, group.second.axes)
    # Parameters that rest whole are gathered once after a step, so that both belong together.
    return (refresh, (whole,)) if group.param.divided else ((), (*refresh, whole))


def _by_differences(unit: UnitPlan, group: GroupPlan) -> Legs:
    """The legs that update second copies after a step by quantized differences, which are small."""
    if group.differences is None or group.second is None:
        return ()
    # The second copy must keep its values, but the whole is gathered right after and may be overwritten.
    up, source = _to_device(group, Buffer.WHOLE)
    record, dtype, stream = group.record_of(group.differences), group.param.dtype, Stream.GATHER
    there, nbytes = record + group.layout.shard_numel * itemsize(dtype), record * group.records
    records, second, outer = Buffer.RECORDS, Buffer.SECOND, unit.axes[len(group.second.axes) :]
    return (
        *up,
        Leg(LegKind.DIFFER, source, records, group.layout.shard_numel, "uint8", dtype, stream, besides=there),
        Leg(LegKind.ALL_GATHER, records, records, nbytes, *_BYTES, stream, outer),
        Leg(LegKind.ADD, records, second, group.second_numel, dtype, dtype, stream, adds=True, besides=nbytes),
    )


def _to_device(group: GroupPlan, target: Buffer) -> tuple[Legs, Buffer]:
    """The legs that copy a shard to its place in the target on the device, and the buffer that has it then."""
    if group.param.tier is Tier.DEVICE:
        return (), Buffer.SHARD
    numel, dtype = group.layout.shard_numel, group.param.dtype
    if group.param.tier is not Tier.NVME:
        return (Leg(LegKind.COPY, Buffer.SHARD, target, numel, dtype, dtype, Stream.GATHER),), target
    return (
        Leg(LegKind.READ, Buffer.SHARD, Buffer.WINDOW, numel, dtype, dtype, Stream.GATHER),
        Leg(LegKind.COPY, Buffer.WINDOW, target, numel, dtype, dtype, Stream.GATHER),
    ), target


def _gather_shards(
    group: GroupPlan, source: Buffer, target: Buffer, numel: int, axes: Axes, route: Route = Route.COLLECTIVE
) -> Legs:
    """A gather of shards, quantized if the plan says so."""
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


def _divide(options: LoweringOptions, buffer: Buffer, numel: int, dtype: str) -> Legs:
    return (Leg(LegKind.DIVIDE, buffer, buffer, numel, dtype, dtype, Stream.COMPUTE),) if options.divides else ()


def _reduce_through_slot(unit: UnitPlan, group: GroupPlan) -> Legs:
    """The reduce from the wire slot to the resting gradients."""
    assert group.grad is not None
    landing = Buffer.STAGING if group.staged and not group.summed_in_place else Buffer.GRAD
    sent = _reduce(unit, group, Buffer.WIRE, landing)
    if not group.update_axes:
        numel, kept = group.layout.numel, group.grad.dtype
        back = Leg(LegKind.CAST, Buffer.WIRE, Buffer.LOCAL, numel, kept, group.wire, Stream.REDUCE)
        return (*sent, *_gather_reduced(group, unit.axes_of(group), landing, Buffer.WIRE), back)
    return (*sent, *_land(group, landing))


def _reduce_by_copies(unit: UnitPlan, group: GroupPlan, source: Buffer) -> Leg:
    """The reduce by copies between peers: into the gradient itself, unless the sum needs further legs."""
    landing = _target_of_copies(unit, group)
    return replace(
        _reduce_scatter(unit, group, source, landing),
        adds=landing is Buffer.GRAD and group.staged,
        route=Route.COPIES,
    )


def _target_of_copies(unit: UnitPlan, group: GroupPlan) -> Buffer:
    beside = group.grad_off_device or (group.staged and bool(replica_axes(unit, group)))
    return Buffer.STAGING if beside else Buffer.GRAD


def _after_copies(unit: UnitPlan, group: GroupPlan) -> Legs:
    landing = _target_of_copies(unit, group)
    return (*_over_replicas(unit, group, landing), *_land(group, landing))


def _reduce(unit: UnitPlan, group: GroupPlan, source: Buffer, landing: Buffer) -> Legs:
    if group.hops and source is not Buffer.LATE:
        return _sum_in_codes(group, source, landing)
    if group.second is not None and source is Buffer.WIRE:
        return _reduce_twice(unit, group, group.second, landing)
    return (_reduce_scatter(unit, group, source, landing), *_over_replicas(unit, group, landing))


def _reduce_scatter(unit: UnitPlan, group: GroupPlan, source: Buffer, landing: Buffer) -> Leg:
    numel, wire = group.layout.numel, group.wire
    return Leg(LegKind.REDUCE_SCATTER, source, landing, numel, wire, wire, Stream.REDUCE, unit.axes_of(group))


def _reduce_twice(unit: UnitPlan, group: GroupPlan, second: SecondCopy, landing: Buffer) -> Legs:
    """Sums within each subgroup, then between them: only 1/parts of the gradients leaves a subgroup through a rank."""
    outer, wire = unit.axes[len(second.axes) :], group.wire
    return (
        replace(_reduce_scatter(unit, group, Buffer.WIRE, Buffer.WIRE_PART), axes=second.axes),
        Leg(LegKind.REDUCE_SCATTER, Buffer.WIRE_PART, landing, group.second_numel, wire, wire, Stream.REDUCE, outer),
    )


def _sum_in_codes(group: GroupPlan, source: Buffer, landing: Buffer) -> Legs:
    """The quantized reduce, hop after hop: each rank receives the codes of its part, and sums them."""
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
            _code_leg(LegKind.ENCODE, source, Buffer.CODES, size.numel, "uint8", read, number, there),
            replace(_code_leg(LegKind.ALL_TO_ALL, Buffer.CODES, Buffer.ARRIVED, codes, *_BYTES, number), axes=hop.axes),
            replace(_code_leg(LegKind.SUM, Buffer.ARRIVED, target, size.landed, kept, kept, number, back), adds=adds),
        ]
        source, read = target, kept
    return tuple(found)


def _code_leg(
    kind: LegKind, source: Buffer, target: Buffer, numel: int, dtype: str, read: str, hop: int, besides: int = 0
) -> Leg:
    return Leg(kind, source, target, numel, dtype, read, Stream.REDUCE, hop=hop, besides=besides)


def _over_replicas(unit: UnitPlan, group: GroupPlan, part: Buffer) -> Legs:
    """The sum over replicas: gradients that are divided over some of the summed axes are summed over the others."""
    axes = replica_axes(unit, group)
    if not axes:
        return ()
    numel, wire = group.layout.shard_numel, group.wire
    return (Leg(LegKind.ALL_REDUCE, part, part, numel, wire, wire, Stream.REDUCE, axes),)


def replica_axes(unit: UnitPlan, group: GroupPlan) -> Axes:
    """The axes along which ranks hold the same part of the unit, but gradients of other data."""
    return tuple(axis for axis in group.sums if axis not in unit.axes_of(group))


def _gather_reduced(group: GroupPlan, axes: Axes, part: Buffer, whole: Buffer) -> Legs:
    """The gather of reduced parts, if every rank updates everything."""
    if group.update_axes:
        return ()
    wire = group.wire
    return (Leg(LegKind.ALL_GATHER, part, whole, group.layout.numel, wire, wire, Stream.REDUCE, axes),)


def _land(group: GroupPlan, landing: Buffer) -> Legs:
    """The legs from the staging buffer to the resting gradients."""
    assert group.grad is not None
    if landing is Buffer.GRAD:
        return ()
    numel, wire, kept = group.layout.shard_numel, group.wire, group.grad.dtype
    if group.grad_off_device:
        return (
            Leg(LegKind.SQUARE, landing, landing, numel, wire, wire, Stream.REDUCE),
            Leg(LegKind.COPY, landing, Buffer.GRAD, numel, kept, wire, Stream.REDUCE),
        )
    return (Leg(LegKind.LAND, landing, Buffer.GRAD, numel, kept, wire, Stream.REDUCE, adds=True),)
