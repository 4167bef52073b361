"""The parts of a plan: units, which are gathered and reduced together, and the flat groups that these are made of."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.field_types import check_fields
from zeroshard.mesh import Axes
from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.hops import ERROR_DTYPE, Hop, HopSize, exchange_nbytes, hop_size
from zeroshard.plan.placement import Blocks, Placement, StateKind, Tier
from zeroshard.plan.policy import HostUpdate
from zeroshard.sharding.layout import FlatLayout

UNSCALE_STRIDE = 4
"""The scale factors of a parameter in fp8 begin at a multiple of so many float32 values."""


@dataclass(frozen=True)
class SecondCopy:
    """A second copy of the parameters in each subgroup of ranks, each rank a part (hpZ).

    See Wang et al. 2023, arXiv:2306.10209, section 4.2. A gather between subgroups makes it after each step; gathers of
    whole parameters then stay within a subgroup. If parameters rest whole it is a part of them, and takes no memory.

    Attributes:
        axes: mesh axes of the subgroup, the first ones of the unit's.
        parts: ranks of a subgroup.
    """

    axes: Axes
    parts: int

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class GroupPlan:
    """One flat buffer of a unit and the placement of each kind of its state.

    Attributes:
        wire: dtype in which gradients travel; "" for frozen groups.
        staged: the reduced part is first written to a staging buffer (to be added or converted), not to the gradient.
        update_axes: mesh axes over which the optimizer step is divided; () if every rank updates everything.
        sums: mesh axes over which gradients are summed; () for frozen groups.
        grad, master, moments: None if the group has no such state (frozen; or the parameters are their own master).
        compressed: a 1-bit optimizer averages momentum in compressed form: beside its part of `moments` each rank keeps
            the whole momentum, the whole error of the first compression, and its part of the error of the second.
        update: how optimizer state that rests off the device is updated; None if it rests on the device.
        owners: for divided parameters that are updated as whole matrices (Muon): the rank along the axis that computes
            each one's update; () for all others.
        factor_ranks: for parameters that are updated from low-rank factors (Dion): the rank of each one's factors; ()
            for all others.
        second: the copy of the parameters in each subgroup; None if there is none.
        codes: blocks of the codes in which sharded parameters are gathered from different shards; None for their own
            dtype.
        differences: blocks of the codes of the differences between shards and second copies, which are sent after a
            step; None to send the parameters.
        hops: the hops of quantized gradients, one after the other; () if they are summed in wire dtype.
        shown: the dtype that the model sees, if the parameters rest, are gathered and multiplied as fp8 codes with
            scales; "" for all others.
        scale_block: side of the square blocks of such a parameter that share a scale; 0 for one scale per parameter.
    """

    layout: FlatLayout
    trainable: bool
    param: Placement
    wire: str = ""
    staged: bool = False
    update_axes: Axes = ()
    sums: Axes = ()
    grad: Placement | None = None
    master: Placement | None = None
    moments: Placement | None = None
    update: HostUpdate | None = None
    owners: tuple[int, ...] = ()
    factor_ranks: tuple[int, ...] = ()
    compressed: bool = False
    second: SecondCopy | None = None
    codes: Blocks | None = None
    differences: Blocks | None = None
    hops: tuple[Hop, ...] = ()
    shown: str = ""
    scale_block: int = 0

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def scaled(self) -> bool:
        """Whether the parameters rest as fp8 codes with scales."""
        return bool(self.shown)

    @property
    def shown_dtype(self) -> str:
        """The dtype that the model sees of the parameters."""
        return self.shown or self.param.dtype

    @property
    def scale_counts(self) -> tuple[int, ...]:
        """Scales of each parameter in fp8; those by block are padded to a multiple of 4."""
        if not self.scaled:
            return ()
        if not self.scale_block:
            return (1,) * len(self.layout.segments)
        blocks = (segment.numel // self.scale_block**2 for segment in self.layout.segments)
        return tuple(-(-count // UNSCALE_STRIDE) * UNSCALE_STRIDE for count in blocks)

    @property
    def scale_nbytes(self) -> int:
        """Bytes on each rank of the largest magnitudes and the scale factors of parameters in fp8."""
        return 4 * sum(self.scale_counts) * (2 if self.scale_block else 1 + UNSCALE_STRIDE)

    @property
    def model_axes(self) -> Axes:
        """Mesh axes over which the model divides the parameters, so that their ranks hold other elements."""
        return tuple(dict.fromkeys(segment.cut.axis for segment in self.layout.segments if segment.cut is not None))

    @property
    def updated_in_parts(self) -> bool:
        """Whether no rank updates all elements of the parameters."""
        return bool(self.model_axes) or (bool(self.update_axes) and self.layout.shards > 1)

    def placement(self, kind: StateKind) -> Placement | None:
        return {
            StateKind.PARAM: self.param,
            StateKind.GRAD: self.grad,
            StateKind.MASTER: self.master,
            StateKind.MOMENTS: self.moments,
            StateKind.ACTIVATION: None,
        }[kind]

    def numel_per_rank(self, placement: Placement) -> int:
        return self.layout.shard_numel if placement.divided else self.layout.numel

    def nbytes(self, kind: StateKind) -> int:
        """Bytes that one rank holds of this kind of state, padding included."""
        placement = self.placement(kind)
        if placement is None:
            return 0
        found = placement.nbytes(self.numel_per_rank(placement))
        if kind is StateKind.PARAM:
            found += self.scale_nbytes
        if self.compressed and kind is StateKind.MOMENTS:
            found += (2 * self.layout.numel + self.layout.shard_numel) * itemsize(placement.dtype)
        return found

    def held_on(self, tier: Tier, kind: StateKind) -> int:
        """Bytes of this kind of state that one rank holds in a tier."""
        placement = self.placement(kind)
        return self.nbytes(kind) if placement is not None and placement.tier is tier else 0

    @property
    def passes_windows(self) -> bool:
        """Whether state or parameters on disk are updated in windows in host memory: by the processor, or as codes."""
        held = (self.param, self.master, self.moments)
        below = any(one is not None and one.tier is Tier.NVME for one in held)
        return below and (self.update is HostUpdate.PROCESSOR or self.in_codes)

    @property
    def in_codes(self) -> bool:
        """Whether moments are kept in few bits."""
        return self.moments is not None and self.moments.blocks is not None

    def piece_numel(self, numel: int) -> int:
        """Elements of a piece of about `numel` elements of this rank's part: whole blocks where there are codes."""
        if self.moments is not None and self.moments.blocks is not None:
            numel = self.moments.blocks.whole(numel)
        return min(numel, self.layout.shard_numel)

    @property
    def updated_off_device(self) -> bool:
        """Whether the optimizer's state rests off the device; if it has no state, whether the parameters do."""
        return self.update is not None

    @property
    def grad_off_device(self) -> bool:
        return self.grad is not None and self.grad.off_device

    @property
    def is_gathered(self) -> bool:
        """Whether a gather has to move this group; groups that rest whole and are frozen or updated whole need none."""
        if self.param.off_device:
            return True
        # A part of a model-divided parameter may belong to a single rank; it is still moved into the unit's slot.
        return self.param.divided or (self.layout.shards > 1 and bool(self.update_axes))

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the whole group in compute dtype."""
        return self.layout.numel * itemsize(self.param.dtype)

    @property
    def second_numel(self) -> int:
        """Elements of the second copy on one rank; 0 where there is none."""
        return 0 if self.second is None else self.layout.numel // self.second.parts

    @property
    def second_nbytes(self) -> int:
        """Bytes that the second copy takes on one rank."""
        return self.second_numel * itemsize(self.param.dtype) if self.param.divided else 0

    @property
    def record_nbytes(self) -> int:
        """The most bytes of one rank's shard in any of its codes; 0 if it is not gathered in codes."""
        return max((self.record_of(one) for one in (self.codes, self.differences) if one is not None), default=0)

    def record_of(self, blocks: Blocks) -> int:
        """Bytes of one rank's shard as codes and scales of such blocks."""
        return blocks.code_nbytes(self.layout.shard_numel) + blocks.scale_nbytes(self.layout.shard_numel)

    @property
    def records(self) -> int:
        """The number of records in one gather."""
        return self.layout.shards // (1 if self.second is None else self.second.parts)

    def second_range(self, rank: int) -> tuple[int, int]:
        """The elements of the second copy of the rank with this number along the unit's axes."""
        assert self.second is not None
        part = rank * self.second.parts // self.layout.shards
        return part * self.second_numel, (part + 1) * self.second_numel

    @property
    def hop_sizes(self) -> tuple[HopSize, ...]:
        """What each hop moves on one rank."""
        found: list[HopSize] = []
        numel, left = self.layout.numel, self.layout.shards
        for hop in self.hops:
            ranks = self.second.parts if self.second is not None and not found else left
            found.append(hop_size(hop, numel, ranks))
            numel, left = numel // ranks, left // ranks
        return tuple(found)

    @property
    def error_numels(self) -> tuple[int, ...]:
        """Per hop, the elements of its rounding errors; 0 if it has no error feedback."""
        pairs = zip(self.hops, self.hop_sizes, strict=True)
        return tuple(0 if hop.feedback is None else size.numel for hop, size in pairs)

    @property
    def errors_nbytes(self) -> int:
        """Bytes of all rounding errors on one rank."""
        return sum(self.error_numels) * itemsize(ERROR_DTYPE)

    @property
    def exchange_nbytes(self) -> int:
        """Bytes of the exchange buffer: outgoing codes, incoming codes, and the sum between two hops."""
        codes, middle = exchange_nbytes(self.hop_sizes)
        return 2 * codes + middle

    @property
    def summed_in_place(self) -> bool:
        """Whether the last hop sums directly into the resting gradient."""
        return bool(self.hops) and not self.grad_off_device

    @property
    def needs_reduce_slot(self) -> bool:
        """Whether gradients are copied to a slot before their reduce, instead of being reduced where they rest."""
        return self.grad is not None and (self.grad.divided or self.grad.dtype != self.wire)

    @property
    def wire_nbytes(self) -> int:
        """Bytes of the whole group's gradients on the wire."""
        return self.layout.numel * itemsize(self.wire) if self.trainable else 0

    @property
    def staging_nbytes(self) -> int:
        """Bytes of this rank's staging buffer in the slot."""
        beside = self.staged and not self.summed_in_place
        return self.layout.shard_numel * itemsize(self.wire) if beside else 0


@dataclass(frozen=True)
class UnitPlan:
    """A unit: parameters that are gathered and reduced together. The root unit's name is "".

    Attributes:
        axes: the mesh axes over which its groups are laid out; a group leaves out the axes over which the model divides
            it.
    """

    name: str
    axes: Axes
    groups: tuple[GroupPlan, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def label(self) -> str:
        return self.name or "(root)"

    def axes_of(self, group: GroupPlan) -> Axes:
        """The mesh axes over which a group is laid out."""
        divided = group.model_axes
        return tuple(axis for axis in self.axes if axis not in divided) if divided else self.axes

    @property
    def sharded(self) -> bool:
        """Whether the parameters rest divided, so that the unit is gathered around its use."""
        return any(group.param.divided for group in self.groups)

    @property
    def reads(self) -> bool:
        """Whether a gather reads parameters from disk first."""
        return any(group.param.tier is Tier.NVME for group in self.groups)

    @property
    def trainable(self) -> bool:
        return any(group.trainable for group in self.groups)

    @property
    def stepped_in_shards(self) -> bool:
        """Whether each rank updates only its part, so that whole parameters are stale after a step."""
        return any(group.trainable and bool(group.update_axes) for group in self.groups)

    @property
    def gathered_nbytes(self) -> int:
        return sum(group.gathered_nbytes for group in self.groups)

    @property
    def reduce_slot_nbytes(self) -> int:
        """Bytes of the slot that its gradients need: the whole on the wire, then this rank's reduced part."""
        return sum(group.wire_nbytes + group.staging_nbytes for group in self.groups if group.needs_reduce_slot)
