"""Placement: for one kind of state, where it rests, over which mesh axis it is divided, and in which dtype.

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
from zeroshard.mesh import BESIDE_DATA, DATA, NESTED, REPLICATE, SHARD, Axes, Mesh
from zeroshard.plan.dtypes import itemsize

MIN_BLOCKED_NUMEL = 4096
"""Parameters with fewer elements keep float32 state (Dettmers et al. 2021, arXiv:2110.02861, section 2)."""


class StateKind(str, Enum):
    """What a byte of training state is for."""

    PARAM = "param"
    """Parameters in compute dtype: what forward and backward read."""
    GRAD = "grad"
    """Gradients between backward and step."""
    MASTER = "master"
    """fp32 truth of parameters whose compute dtype is narrower."""
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
    """Whether the whole of a state is always there, or made around its use."""

    RESIDENT = "resident"
    AROUND_USE = "around_use"


@dataclass(frozen=True)
class Blocks:
    """State in few bits: codes, and a float32 scale for each block of neighbouring elements of a parameter.

    Attributes:
        bits: of one code, 8 or 4.
        size: elements of a block; whole bytes of codes.
    """

    bits: int
    size: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise PlanError(f"blocks of {self.bits}-bit codes: 8 and 4 bits are there")
        if not isinstance(self.size, int) or self.size < 2 or self.size % 2:
            raise PlanError(f"block_size {self.size!r}: an even number of at least 2 is needed")

    def suit(self, numel: int) -> bool:
        """Whether a parameter of `numel` elements is kept in blocks; small ones and odd ones stay in float32."""
        return numel >= MIN_BLOCKED_NUMEL and numel % self.size == 0

    def code_nbytes(self, numel: int) -> int:
        return numel * self.bits // 8

    def scale_nbytes(self, numel: int) -> int:
        return numel // self.size * 4


GATHER_CODES = Blocks(bits=8, size=256)
"""As which parameters are gathered where a config asks for it: 1.6 % of scales, and an error of 1/254 of the largest
element of a block at most."""
LOW_GATHER_CODES = Blocks(bits=4, size=64)
"""The same in 4 bits: an error of 1/14 of the largest element of a block, which frozen parameters may bear."""
DIFFERENCE_CODES = Blocks(bits=4, size=128)
"""As which second copies get what a step has changed; its error does not add up, for it is in the next difference."""


@dataclass(frozen=True)
class Placement:
    """Where one kind of state of one flat group lives.

    Attributes:
        axes: mesh axes over which the state is divided; () when every rank holds all of it.
        dtype: name of the dtype in which it is stored, or which it is read as where it is in blocks.
        copies: how many tensors of this kind there are per parameter (Adam's moments: 2).
        blocks: how it is stored in fewer bits; None where it is not.
    """

    axes: Axes
    dtype: str
    tier: Tier = Tier.DEVICE
    residency: Residency = Residency.RESIDENT
    copies: int = 1
    blocks: Blocks | None = None

    @property
    def away(self) -> bool:
        """Whether it rests off the device."""
        return self.tier is not Tier.DEVICE

    @property
    def divided(self) -> bool:
        """Whether each rank holds a part only."""
        return bool(self.axes)

    def nbytes(self, numel: int) -> int:
        """Bytes of the state of `numel` elements, all copies."""
        if self.blocks is None:
            return numel * itemsize(self.dtype) * self.copies
        return (self.blocks.code_nbytes(numel) + self.blocks.scale_nbytes(numel)) * self.copies


@dataclass(frozen=True)
class Sharding:
    """One row of the table above: which kinds of state are divided, and over which axes of the mesh.

    Each rank updates the part that it has, so parameters or gradients are divided only together with the state.
    """

    param: bool
    grad: bool
    state: bool
    axes: Axes = DATA

    def __post_init__(self) -> None:
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
        """The row with each subgroup of the mesh holding one copy of the state, where it has several."""
        return self.over((SHARD,)) if mesh.size((REPLICATE,)) > 1 and self.axes != NESTED else self

    def over(self, axes: Axes) -> Sharding:
        """The row over other axes; second copies are for parameters that are divided, and left out for others."""
        return replace(self, axes=DATA if axes == NESTED and not self.param else axes)

    def with_second_copies(self, mesh: Mesh) -> Sharding:
        """The row with all state divided over all ranks, and parameters once more in each subgroup of the mesh (hpZ).

        Raises:
            PlanError: parameters rest whole, so that nothing is gathered between a step and the next.
        """
        if not self.param:
            raise PlanError(
                "a second copy of the parameters in each subgroup (zero_hpz_partition_size) saves gathers of stage 3; "
                "at this stage parameters rest whole"
            )
        return self.nested(mesh)

    def nested(self, mesh: Mesh) -> Sharding:
        """The row over all ranks, those of a subgroup together: what is sent goes within subgroups, then between them.

        Where parameters are divided each subgroup has a second copy of them.
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
