"""A mesh: the ranks of a job as named axes.

    8 ranks, dp_replicate 2 x dp_shard 4        over dp_shard      over dp_replicate     over both
        0 1 2 3                                 {0 1 2 3}          {0 4} {1 5}           {0 .. 7}
        4 5 6 7                                 {4 5 6 7}          {2 6} {3 7}

Axes stand outermost first, and ranks are numbered row by row. It is a value: a plan holds one, and it is known before
any process runs. Names are those of torch's DeviceMesh in the ecosystem. Rejected: to hold a DeviceMesh itself, which
makes communicators, binds a device, and needs a process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from zeroshard.errors import PlanError
from zeroshard.field_types import check_fields

Axes = tuple[str, ...]
"""Names of axes, outermost first, whose ranks are taken together."""
REPLICATE, SHARD = "dp_replicate", "dp_shard"
DATA: Axes = (REPLICATE, SHARD)
"""The axes of data parallelism, whose ranks differ in nothing but the data that they read."""
NESTED: Axes = (SHARD, REPLICATE)
"""The same ranks in another order: parts of ranks with the same place in their subgroups are neighbours, so that a
gather over `dp_replicate` gives each rank a connected 1/`dp_shard` of the whole, and one over `dp_shard` the rest."""
TENSOR, EXPERT = "tp", "ep"
MODEL_AXES: Axes = (TENSOR, EXPERT)
"""The axes over which a model itself divides its parameters."""
SEQUENCE: Axes = ("cp", "sp")
"""The axes whose ranks read other parts of the same sequences: state is divided over them as over data axes."""
READERS: Axes = (*DATA, EXPERT)
"""The axes whose ranks read different data: those with other experts do, and send each other tokens."""
BESIDE_DATA: Axes = (*SEQUENCE, EXPERT)
"""Further axes over which gradients are summed and state is divided, of parameters that all of their ranks have."""
STAGES = "pp"
"""The axis along which ranks have other layers of the model: each of its positions is a mesh of its own for ZeRO."""
KNOWN: Axes = (STAGES, REPLICATE, SHARD, "cp", "sp", "tp", "ep")


_OTHER_NAMES = {
    "dp": SHARD,
    "fsdp": SHARD,
    "shard": SHARD,
    "data_parallel": SHARD,
    "ddp": REPLICATE,
    "replicate": REPLICATE,
    "sequence_parallel": "sp",
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "expert_parallel": "ep",
}


def axis_name(name: str) -> str:
    """The name of an axis in a plan, from a DeviceMesh's name of it."""
    return _OTHER_NAMES.get(name, name)


@dataclass(frozen=True)
class MeshAxis:
    """One axis and the number of ranks along it."""

    name: str
    size: int

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Mesh:
    """Named axes, outermost first.

    Raises PlanError for names that are not known, that come twice, or sizes below 1.
    """

    axes: tuple[MeshAxis, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        names = [axis.name for axis in self.axes]
        for axis in self.axes:
            if axis.name not in KNOWN or names.count(axis.name) > 1:
                raise PlanError(f"mesh axis {axis.name!r}: each of {', '.join(KNOWN)} may be there once")
            if axis.size < 1:
                raise PlanError(f"mesh axis {axis.name!r} has {axis.size} ranks; at least 1 is needed")

    @staticmethod
    def data_parallel(ranks: int, shard: int | None = None) -> Mesh:
        """So many data-parallel ranks, in subgroups of `shard` with consecutive numbers; None is one group of all."""
        shard = ranks if shard is None else shard
        for what, number in (("ranks", ranks), ("a shard group", shard)):
            if type(number) is not int:
                raise PlanError(f"{what}: {number!r} must be a whole number of ranks")
        if ranks < 1 or shard < 1 or ranks % shard:
            raise PlanError(f"a shard group of {shard} ranks does not divide {ranks} data-parallel ranks")
        return Mesh((MeshAxis(REPLICATE, ranks // shard), MeshAxis(SHARD, shard)))

    @property
    def names(self) -> Axes:
        return tuple(axis.name for axis in self.axes)

    @property
    def world_size(self) -> int:
        """Ranks of the whole mesh."""
        return self.size(self.names)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different data."""
        return self.size(self.among(READERS))

    @property
    def sequence(self) -> Axes:
        """The axes of several ranks over which sequences are divided."""
        return tuple(axis.name for axis in self.axes if axis.name in SEQUENCE and axis.size > 1)

    @property
    def beside_data(self) -> Axes:
        """The axes of several ranks over which state is divided besides those of data."""
        return tuple(axis.name for axis in self.axes if axis.name in BESIDE_DATA and axis.size > 1)

    @property
    def summed(self) -> Axes:
        """The axes over which gradients of what all ranks have are summed."""
        return (*DATA, *self.beside_data)

    def size(self, over: Axes) -> int:
        """Ranks that meet over these axes. Raises PlanError for an axis that the mesh does not have."""
        return math.prod(self._size_of(name) for name in over)

    def among(self, axes: Iterable[str]) -> Axes:
        """Those of `axes` that the mesh has, outermost first."""
        wanted = set(axes)
        return tuple(name for name in self.names if name in wanted)

    def without(self, axes: Axes) -> Axes:
        """The axes of the mesh that are not among `axes`."""
        return tuple(name for name in self.names if name not in axes)

    def position(self, rank: int, over: Axes) -> int:
        """The number of a rank among those that it meets over these axes."""
        found = 0
        for name in over:
            found = found * self._size_of(name) + rank // self.stride(name) % self._size_of(name)
        return found

    def stride(self, name: str) -> int:
        """The distance between the numbers of neighbours along an axis."""
        return math.prod(axis.size for axis in self.axes[self.names.index(name) + 1 :])

    def groups(self, over: Axes) -> list[list[int]]:
        """All ranks, in the groups that meet over these axes, each in order of position."""
        found: dict[int, list[int]] = {}
        others = self.without(over)
        for rank in range(self.world_size):
            found.setdefault(self.position(rank, others), []).append(rank)
        return [sorted(ranks, key=lambda rank: self.position(rank, over)) for ranks in found.values()]

    def first(self, rank: int, axes: Axes) -> bool:
        """Whether a rank is the first of those that hold the same part of what is divided over `axes`."""
        return self.position(rank, self.without(axes)) == 0

    def of_stage(self) -> Mesh:
        """The mesh of the ranks of one pipeline stage: this one without its axis `pp`."""
        return Mesh(tuple(axis for axis in self.axes if axis.name != STAGES))

    def __str__(self) -> str:
        return " x ".join(f"{axis.name} {axis.size}" for axis in self.axes)

    def _size_of(self, name: str) -> int:
        for axis in self.axes:
            if axis.name == name:
                return axis.size
        raise PlanError(f"the mesh has no axis {name!r}; it has {', '.join(self.names)}")
