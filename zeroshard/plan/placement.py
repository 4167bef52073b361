"""Placement: the tier, the mesh axes and the dtype of one kind of state.

ZeRO's stages are rows of this table, not classes:

    stage   PARAM        GRAD         MASTER, MOMENTS
    0       whole        whole        whole
    1       whole        whole        sharded
    2       whole        sharded      sharded
    3       sharded      sharded      sharded        (Rajbhandari et al. 2020, arXiv:1910.02054, section 5)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from zeroshard.errors import PlanError
from zeroshard.field_types import check_fields
from zeroshard.mesh import BESIDE_DATA, DATA, NESTED, REPLICATE, SHARD, Axes, Mesh
from zeroshard.plan.dtypes import itemsize

MIN_BLOCKED_NUMEL = 4096
"""Parameters with fewer elements keep float32 state (Dettmers et al. 2021, arXiv:2110.02861, section 2)."""


class StateKind(str, Enum):
    """The kinds of training state."""

    PARAM = "param"
    """Parameters in compute dtype, which forward and backward read."""
    GRAD = "grad"
    """Gradients between backward and step."""
    MASTER = "master"
    """Master weights in fp32 of parameters whose compute dtype is narrower."""
    MOMENTS = "moments"
    """Optimizer state."""
    ACTIVATION = "activation"
    """Checkpointed activations."""


class Tier(str, Enum):
    """The memory in which a state rests."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Residency(str, Enum):
    """Whether a state always exists, or only around its use."""

    RESIDENT = "resident"
    AROUND_USE = "around_use"


@dataclass(frozen=True)
class Blocks:
    """Quantization in blocks: codes of few bits, and a float32 scale for each block of neighbouring elements.

    Attributes:
        bits: of one code, 8 or 4.
        size: elements of a block; whole bytes of codes.
    """

    bits: int
    size: int

    def __post_init__(self) -> None:
        check_fields(self)
        if self.bits not in (4, 8):
            raise PlanError(f"blocks of {self.bits}-bit codes: 8 and 4 bits are there")
        if self.size < 2 or self.size % 2:
            raise PlanError(f"block_size {self.size!r}: an even number of at least 2 is needed")

    def suit(self, numel: int) -> bool:
        """Whether a parameter of `numel` elements is kept in blocks; small ones and odd ones stay in float32."""
        return numel >= MIN_BLOCKED_NUMEL and numel % self.size == 0

    def code_nbytes(self, numel: int) -> int:
        return numel * self.bits // 8

    def scale_nbytes(self, numel: int) -> int:
        return numel // self.size * 4

    def whole(self, numel: int) -> int:
        """The most elements up to `numel` that are whole blocks, at least one block."""
        return max(1, numel // self.size) * self.size


GATHER_CODES = Blocks(bits=8, size=256)
"""Codes for gathers of parameters, if a config asks for them: 1.6 % of scales, and an error of at most 1/254 of the
largest element of a block."""
LOW_GATHER_CODES = Blocks(bits=4, size=64)
"""The same in 4 bits, for frozen parameters: an error of at most 1/14 of the largest element of a block."""
DIFFERENCE_CODES = Blocks(bits=4, size=128)
"""Codes for the differences of second copies; their errors do not add up, since the next difference contains them."""


@dataclass(frozen=True)
class Placement:
    """Where one kind of state of one flat group lives.

    Attributes:
        axes: mesh axes over which the state is divided; () when every rank holds all of it.
        dtype: name of the dtype in which it is stored, or, if it is quantized, in which it is read.
        copies: how many tensors of this kind there are per parameter (Adam's moments: 2).
        blocks: the blocks in which it is quantized; None if it is not.
    """

    axes: Axes
    dtype: str
    tier: Tier = Tier.DEVICE
    residency: Residency = Residency.RESIDENT
    copies: int = 1
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def off_device(self) -> bool:
        """Whether it rests off the device."""
        return self.tier is not Tier.DEVICE

    @property
    def divided(self) -> bool:
        """Whether each rank holds a part only."""
        return bool(self.axes)

    def nbytes(self, numel: int) -> int:
        """Bytes of the state of `numel` elements, all copies."""
        return sum(self.rows(numel))

    def rows(self, numel: int) -> list[int]:
        """Bytes of each tensor in which the state of `numel` elements is kept: codes and scales apart, if there are."""
        if self.blocks is None:
            return [numel * itemsize(self.dtype)] * self.copies
        return [self.blocks.code_nbytes(numel), self.blocks.scale_nbytes(numel)] * self.copies


@dataclass(frozen=True)
class Sharding:
    """One row of the table above: which kinds of state are divided, and over which axes of the mesh.

    Each rank updates its own part, so parameters or gradients can be divided only together with the optimizer state.
    """

    param: bool
    grad: bool
    state: bool
    axes: Axes = DATA

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.param or self.grad) and not self.state:
            raise PlanError(
                f"{self}: where parameters or gradients are divided each rank updates its part, so the optimizer's "
                "state is divided too; set state=True"
            )
        if tuple(axis for axis in self.axes if axis not in BESIDE_DATA) not in (DATA, (SHARD,), NESTED):
            raise PlanError(
                f"{self}: axes must be {DATA} (all data-parallel ranks), {(SHARD,)} (a subgroup of them) or {NESTED} "
                "(all of them, and a second copy of the parameters in each subgroup)"
            )

    def placed(self, sharded: bool) -> Axes:
        return self.axes if sharded else ()

    def on(self, mesh: Mesh) -> Sharding:
        """The row for a mesh: if it has several subgroups, each holds one copy of the state."""
        return self.over((SHARD,)) if mesh.size((REPLICATE,)) > 1 and self.axes != NESTED else self

    def over(self, axes: Axes) -> Sharding:
        """The row over other axes; second copies are left out if parameters are not divided."""
        return replace(self, axes=DATA if axes == NESTED and not self.param else axes)

    def with_second_copies(self, mesh: Mesh) -> Sharding:
        """The row with all state divided over all ranks, and a second copy of parameters in each subgroup (hpZ).

        Raises:
            PlanError: parameters rest whole, so a second copy would save no gather.
        """
        if not self.param:
            raise PlanError(
                "a second copy of the parameters in each subgroup (zero_hpz_partition_size) saves gathers of stage 3; "
                "at this stage parameters rest whole"
            )
        return self.nested(mesh)

    def nested(self, mesh: Mesh) -> Sharding:
        """The row over all ranks in nested order: data is sent within subgroups first, then between them.

        If parameters are divided, each subgroup has a second copy of them.
        """
        several = mesh.size((REPLICATE,)) > 1 and mesh.size((SHARD,)) > 1
        return replace(self, axes=NESTED if several else DATA)


STAGES = {
    0: Sharding(param=False, grad=False, state=False),
    1: Sharding(param=False, grad=False, state=True),
    2: Sharding(param=False, grad=True, state=True),
    3: Sharding(param=True, grad=True, state=True),
}
"""ZeRO's stages as rows of the placement table."""
