"""The axis over which a process's sequences are divided, and its communicators.

    4 ranks, 2 to a sequence      one sequence {0 1} {2 3}      the same part of other data {0 2} {1 3}

Libraries ask for the axis without naming a model (`deepspeed.utils.groups`), before there is an engine. So a process
has one, kept by the default process group that it divides, and goes with that. Rejected: an axis per engine, which
those questions could not find; the engine's own communicators, behind whose gathers an exchange would wait.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from zeroshard.comm.mesh import group_timeout
from zeroshard.errors import PlanError, UsageError
from zeroshard.mesh import READERS, REPLICATE, SHARD, Mesh, MeshAxis

AXIS = "sp"
_AXES: weakref.WeakKeyDictionary[dist.ProcessGroup, SequenceAxis] = weakref.WeakKeyDictionary()
"""By the default process group, the axis that divides the sequences of its ranks."""


@dataclass(frozen=True)
class SequenceAxis:
    """The ranks that have parts of one sequence.

    Attributes:
        mesh: all ranks.
        rank: of this process, in the mesh.
        group: the ranks of this rank's sequence.
        data_group: the ranks that have the same part of other sequences; None where this rank is the only one.
    """

    mesh: Mesh
    rank: int
    group: dist.ProcessGroup
    data_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Ranks that have parts of one sequence."""
        return self.mesh.size((AXIS,))

    @property
    def place(self) -> int:
        """Which part of its sequence this rank has."""
        return self.mesh.position(self.rank, (AXIS,))

    @property
    def data_place(self) -> int:
        """This rank's number among those that read different data."""
        return self.mesh.position(self.rank, self.mesh.among(READERS))


@dataclass(frozen=True)
class SequenceParallel:
    """What `initialize(mpu=...)` takes for divided sequences: the axis, and how a model's attention exchanges over it.

    Attributes:
        core: transformers' name of the attention that runs on the whole sequence; None for the model's own.
        disable_in_eval: a model in evaluation gets whole sequences.
        exchanges: a transformers model's attention is divided by `initialize`; else the script has done so.
    """

    axis: SequenceAxis
    core: str | None = None
    disable_in_eval: bool = False
    exchanges: bool = True

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's sequence."""
        return self.axis.group

    def get_sequence_parallel_world_size(self) -> int:
        """Ranks that have parts of one sequence."""
        return self.axis.size

    def get_sequence_parallel_rank(self) -> int:
        """Which part of its sequence this rank has."""
        return self.axis.place

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that have the same part of other sequences."""
        return self.axis.data_group

    def get_data_parallel_world_size(self) -> int:
        """Ranks that read different data."""
        return self.axis.mesh.data_parallel_size

    def get_data_parallel_rank(self) -> int:
        """This rank's number among those that read different data."""
        return self.axis.data_place

    def get_model_parallel_world_size(self) -> int:
        """Ranks over which the model itself is divided: this axis divides sequences alone."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those over which the model is divided."""
        return 0


def find_axis() -> SequenceAxis | None:
    """The axis that divides this process's sequences; None where they are whole."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if world is None else _AXES.get(world)


def divide_sequences(size: int, asked_by: str, mesh: Mesh | None = None) -> SequenceAxis:
    """The axis of `size` ranks, made where there is none; called by all ranks.

    Args:
        asked_by: who asks, for messages.
        mesh: all ranks, with an axis `sp` of that size; by default neighbours have a sequence. Where the axis is there
            already, it takes over what the mesh says of the other ranks.

    Raises:
        PlanError: the ranks don't divide by `size`, or are divided in another way.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"{asked_by}: {size!r} ranks to a sequence; a whole number of at least 1 is needed")
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None:
        raise UsageError(
            f"{asked_by}: no process group is there whose ranks could have parts of a sequence; start the script with "
            "zeroshard run, or call zeroshard.init_distributed() before"
        )
    if world.size() % size:
        raise PlanError(f"{asked_by} {size} does not divide the {world.size()} ranks that run")
    wanted = neighbours(world.size(), size) if mesh is None else mesh
    known = _AXES.get(world)
    if known is None:
        known = _AXES[world] = _made(wanted)
    if known.mesh.groups((AXIS,)) != wanted.groups((AXIS,)):
        raise PlanError(
            f"{asked_by} {size}: sequences of this process are divided over {known.size} ranks already "
            f"({known.mesh.groups((AXIS,))}); ask for one number in all places"
        )
    if mesh is not None and known.mesh != mesh:  # it says what the other ranks do, too
        known = _AXES[world] = replace(known, mesh=mesh, data_group=_data_group(mesh))
    return known


def neighbours(world: int, size: int) -> Mesh:
    """All ranks with `size` neighbours to a sequence."""
    return Mesh((MeshAxis(REPLICATE, 1), MeshAxis(SHARD, world // size), MeshAxis(AXIS, size)))


def _made(mesh: Mesh) -> SequenceAxis:
    rank = dist.get_rank()
    group = _own(mesh.groups((AXIS,)), rank, "zeroshard sequence")
    assert group is not None
    return SequenceAxis(mesh, rank, group, _data_group(mesh))


def _data_group(mesh: Mesh) -> dist.ProcessGroup | None:
    data = mesh.groups(mesh.among(READERS))
    return None if len(data[0]) == 1 else _own(data, dist.get_rank(), "zeroshard data")


def _own(partition: list[list[int]], rank: int, description: str) -> dist.ProcessGroup | None:
    """This rank's group of a partition; every rank makes every group, as c10d demands."""
    own: dist.ProcessGroup | None = None
    for ranks in partition:
        made: Any = dist.new_group(ranks, timeout=group_timeout(), group_desc=description)
        if rank in ranks:
            own = made
    return own
