"""The parts of a plan: units, which are gathered and reduced together, and the flat groups that these are made of."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.mesh import Axes
from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.hops import ERROR_DTYPE, Hop, HopSize, exchange_nbytes, hop_size
from zeroshard.plan.placement import Blocks, Placement, StateKind, Tier
from zeroshard.plan.policy import HostUpdate
from zeroshard.sharding.layout import FlatLayout

UNSCALE_STRIDE = 4
"""float32 values from what turns the codes of one parameter into values to that of the next."""


@dataclass(frozen=True)
class SecondCopy:
    """Parameters that a subgroup of ranks holds once more, each rank a part of them.

    This is hpZ (Wang et al. 2023, arXiv:2306.10209, section 4.2).

    It is made by a gather between subgroups after each step; gathers of whole parameters then stay within one. Where
    parameters rest whole it is a part of them, and takes no memory.

    Attributes:
        axes: mesh axes of the subgroup, the first ones of the unit's.
        parts: ranks of a subgroup.
    """

    axes: Axes
    parts: int


@dataclass(frozen=True)
class GroupPlan:
    """One flat buffer of a unit and the placement of each kind of its state.

    Attributes:
        wire: dtype in which gradients travel; "" for frozen groups.
        staged: the reduced part lands beside the slot first (to be added or converted), not in the gradient itself.
        update_axes: mesh axes over which the optimizer step is divided; () where every rank updates everything.
        sums: mesh axes over which gradients are summed; () for frozen groups.
        grad, master, moments: None where the group has no such state (frozen; or the parameters are their own master).
        compressed: an optimizer averages momentum in compressed form (1-bit): beside `moments`, of which the update
            reads its part, each rank keeps the whole momentum, the whole of what its own compression left out, and its
            part of what the second one did.
        update: how optimizer state that rests off the device is updated; None where it rests there.
        owners: for parameters that are updated as whole matrices although divided (Muon): the rank along the axis that
            makes each one's update; () for all others.
        second: the copy of the parameters in each subgroup; None where there is none.
        codes: blocks as which sharded parameters are gathered between ranks that hold different shards; None for their
            own dtype.
        differences: blocks as which trained parameters reach second copies after a step, as what these lack to be as
            the shards; None where they are gathered anew.
        hops: the sums of gradients in codes, one after the other; () where they are summed in wire dtype.
        shown: dtype that the model sees of parameters which rest, are gathered and multiplied as fp8 numbers with a
            scale each; "" for all others, which it sees as they rest.
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
    compressed: bool = False
    second: SecondCopy | None = None
    codes: Blocks | None = None
    differences: Blocks | None = None
    hops: tuple[Hop, ...] = ()
    shown: str = ""

    @property
    def scaled(self) -> bool:
        """Whether the parameters are fp8 numbers with a scale each."""
        return bool(self.shown)

    @property
    def shown_dtype(self) -> str:
        """The dtype that the model sees of the parameters."""
        return self.shown or self.param.dtype

    @property
    def scale_nbytes(self) -> int:
        """Bytes on each rank of the largest magnitude of each parameter, and of what turns its codes into values."""
        return 4 * (1 + UNSCALE_STRIDE) * len(self.layout.segments) if self.scaled else 0

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
        """Whether the processor updates state or parameters on disk, which pass through windows in host memory."""
        held = (self.param, self.master, self.moments)
        below = any(one is not None and one.tier is Tier.NVME for one in held)
        return self.update is HostUpdate.PROCESSOR and below

    @property
    def updated_away(self) -> bool:
        """Whether the optimizer's state rests off the device; where it has none, whether the parameters do."""
        return self.update is not None

    @property
    def grad_away(self) -> bool:
        return self.grad is not None and self.grad.away

    @property
    def travels(self) -> bool:
        """Whether a gather moves anything for this group: frozen or wholly updated resident groups are current."""
        if self.param.away:
            return True
        # A part that the model divides may be one rank's alone, and comes into the slot of its unit all the same.
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
        """Bytes of one rank's shard in codes, of those in which it is gathered the most; 0 where it is not."""
        return max((self.record_of(one) for one in (self.codes, self.differences) if one is not None), default=0)

    def record_of(self, blocks: Blocks) -> int:
        """Bytes of one rank's shard in such blocks."""
        return blocks.code_nbytes(self.layout.shard_numel) + blocks.scale_nbytes(self.layout.shard_numel)

    @property
    def records(self) -> int:
        """Ranks whose records one gather brings together."""
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
        """Elements of what each hop rounded off and gives back; 0 where it does not."""
        pairs = zip(self.hops, self.hop_sizes, strict=True)
        return tuple(0 if hop.feedback is None else size.numel for hop, size in pairs)

    @property
    def errors_nbytes(self) -> int:
        """Bytes of that on one rank."""
        return sum(self.error_numels) * itemsize(ERROR_DTYPE)

    @property
    def exchange_nbytes(self) -> int:
        """Bytes through which sums in codes pass: codes that go out, those that come in, the sum between two hops."""
        codes, middle = exchange_nbytes(self.hop_sizes)
        return 2 * codes + middle

    @property
    def summed_in_place(self) -> bool:
        """Whether the last hop sums straight into the gradient where it rests."""
        return bool(self.hops) and not self.grad_away

    @property
    def needs_reduce_slot(self) -> bool:
        """Whether gradients pass through a slot on their way to the wire, instead of being reduced where they rest."""
        return self.grad is not None and (self.grad.divided or self.grad.dtype != self.wire)

    @property
    def wire_nbytes(self) -> int:
        """Bytes of the whole group's gradients on the wire."""
        return self.layout.numel * itemsize(self.wire) if self.trainable else 0

    @property
    def staging_nbytes(self) -> int:
        """Bytes of this rank's reduced part where it lands beside the slot."""
        beside = self.staged and not self.summed_in_place
        return self.layout.shard_numel * itemsize(self.wire) if beside else 0


@dataclass(frozen=True)
class UnitPlan:
    """What is gathered and reduced together. The root unit's name is "".

    Attributes:
        axes: the mesh axes that the layouts of its groups are cut for, but for those over which the model divides one.
    """

    name: str
    axes: Axes
    groups: tuple[GroupPlan, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        return self.name or "(root)"

    def axes_of(self, group: GroupPlan) -> Axes:
        """The mesh axes that the layout of a group is cut for."""
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
