"""Placement: for one kind of state, where it rests, over which mesh axis it is divided, and in which dtype.

ZeRO's stages are rows of this table, not classes:

    stage   PARAM        GRAD         MASTER, MOMENTS
    0       whole        whole        whole
    1       whole        whole        sharded
    2       whole        sharded      sharded
    3       sharded      sharded      sharded        (Rajbhandari et al. 2020, arXiv:1910.02054, section 5)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
class Placement:
    """Where one kind of state of one flat group lives.

    Attributes:
        axis: mesh axis over which the state is divided ('dp' or 'shard'); None when every rank holds all of it.
        dtype: name of the dtype in which it is stored.
        copies: how many tensors of this kind there are per parameter (Adam's moments: 2).
    """

    axis: str | None
    dtype: str
    tier: Tier = Tier.DEVICE
    residency: Residency = Residency.RESIDENT
    copies: int = 1


@dataclass(frozen=True)
class Sharding:
    """One row of the table above: which kinds of state are divided, and over which axis."""

    param: bool
    grad: bool
    state: bool
    axis: str = "dp"

    def placed(self, sharded: bool) -> str | None:
        return self.axis if sharded else None


STAGES = {
    0: Sharding(param=False, grad=False, state=False),
    1: Sharding(param=False, grad=False, state=True),
    2: Sharding(param=False, grad=True, state=True),
    3: Sharding(param=True, grad=True, state=True),
}
"""ZeRO's stages as rows of the placement table."""
