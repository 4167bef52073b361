"""The communicators of one rank over the axes of a mesh.

The ranks along some axes share three communicators: gather and reduce, so that an all-gather never queues behind a
reduce-scatter, and control for the small messages between steps. Axes with the same groups of ranks share them.

torch's DeviceMesh was rejected as the base: it makes one communicator per axis, wants a device type and binds the
device, and has no form for one process without a process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from zeroshard.errors import DivergenceError, PlanError
from zeroshard.mesh import Axes, Mesh


@dataclass(frozen=True)
class AxisGroups:
    """The communicators over some axes; all None for a single rank, which sends nothing."""

    gather: dist.ProcessGroup | None = None
    reduce: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    def all(self) -> Iterable[dist.ProcessGroup]:
        return (group for group in (self.gather, self.reduce, self.control) if group is not None)


@dataclass(frozen=True)
class RankMesh:
    """A mesh, this rank's number in it, and its communicators over those axes that were asked for."""

    mesh: Mesh
    rank: int
    groups: Mapping[Axes, AxisGroups]

    @property
    def world_size(self) -> int:
        """Ranks of the whole mesh."""
        return self.mesh.world_size

    def over(self, axes: Axes) -> AxisGroups:
        """The communicators of this rank over these axes."""
        return self.groups[axes]

    def store(self) -> dist.Store | None:
        """The store through which the ranks of the mesh met, for the watchdog; None for a single rank."""
        control = self.over(self.mesh.names).control
        return None if control is None else control.get_group_store()

    def made(self) -> list[dist.ProcessGroup]:
        """The communicators that the mesh made."""
        return list({id(group): group for groups in self.groups.values() for group in groups.all()}.values())

    def destroy(self) -> None:
        """Destroy the communicators that the mesh made; the default process group stays."""
        if not dist.is_initialized():
            return  # they went with it
        for group in self.made():
            dist.destroy_process_group(group)


def world_size() -> int:
    """Ranks of the default process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def build_mesh(mesh: Mesh | None = None, over: Iterable[Axes] = (), whole: Mesh | None = None) -> RankMesh:
    """Communicators for `mesh` over the default process group, or over this process alone when there is none.

    Called by all ranks in the same order.

    Args:
        mesh: by default one data-parallel group of all ranks.
        over: axes to make communicators over, beside all axes together.
        whole: of all ranks, where `mesh` is that of one pipeline stage; the rank's number is that in its stage then.

    Raises:
        PlanError: the mesh is for another number of ranks.
    """
    joined = dist.is_available() and dist.is_initialized()
    size, rank = (dist.get_world_size(), dist.get_rank()) if joined else (1, 0)
    mesh = Mesh.data_parallel(size) if mesh is None else mesh
    whole = mesh if whole is None else whole
    if whole.world_size != size:
        raise PlanError(f"the mesh {whole} is for {whole.world_size} ranks, but there are {size}")
    made: dict[tuple[tuple[int, ...], ...], AxisGroups] = {}
    groups: dict[Axes, AxisGroups] = {}
    for axes in dict.fromkeys((mesh.names, *over)):
        partition = tuple(sorted(tuple(sorted(ranks)) for ranks in whole.groups(axes)))
        if partition not in made:
            made[partition] = _axis_groups("+".join(axes), partition, rank)
        groups[axes] = made[partition]
    return RankMesh(mesh, whole.position(rank, mesh.names), groups)


def _axis_groups(name: str, partition: Sequence[Sequence[int]], rank: int) -> AxisGroups:
    """The communicators of this rank's group of `partition`; every rank makes every group, as c10d demands."""
    if len(partition[0]) == 1:
        return AxisGroups()
    made = [new_groups(f"{name} {purpose}", partition, rank) for purpose in ("gather", "reduce", "control")]
    return AxisGroups(*made)


def new_groups(name: str, partition: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """Make a communicator of each group of ranks; that of `rank`, None where it is in no group. Called by all ranks."""
    own: dist.ProcessGroup | None = None
    for ranks in partition:
        group = _new_group(ranks, f"zeroshard {name}")
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            own = group
    return own


def group_timeout() -> timedelta:
    """How long the default process group lets a collective wait, which the program has chosen."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return everyone._get_backend(everyone._device_types[0]).options._timeout


def _new_group(ranks: Sequence[int], description: str) -> dist.ProcessGroup | int:
    """A communicator with the default group's timeout, which the program has chosen; torch would take its own.

    Raises:
        DivergenceError: not all ranks have come here within that time.
    """
    timeout = group_timeout()
    try:
        made = dist.new_group(list(ranks), timeout=timeout, group_desc=description)
    except RuntimeError as error:  # stores and backends have kinds of their own
        raise DivergenceError(
            f"rank {dist.get_rank()} did not meet the other ranks within {timeout.total_seconds():g} s: they have "
            "ended, or never come to initialize() or shard(), which all ranks call "
            f"({str(error).partition(chr(10))[0]})"
        ) from error
    assert made is not None
    return made
