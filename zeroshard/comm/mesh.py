"""The communicators of one rank over the axes of a mesh.

The ranks along some axes share three communicators: gather and reduce, so that an all-gather never queues behind a
reduce-scatter, and control for the small messages between steps. Axes with the same groups of ranks share them.

torch's DeviceMesh was rejected as the base: it makes one communicator per axis, wants a device type and binds the
device, and has no form for one process without a process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from zeroshard.errors import DivergenceError, PlanError
from zeroshard.mesh import Axes, Mesh

Partition = tuple[tuple[int, ...], ...]
"""The groups of ranks along some axes, sorted."""


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
        PlanError: the mesh is for another number of ranks, or the ranks have different ones.
        DivergenceError: not all ranks have come here within the default group's timeout.
    """
    joined = dist.is_available() and dist.is_initialized()
    size, rank = (dist.get_world_size(), dist.get_rank()) if joined else (1, 0)
    mesh = Mesh.data_parallel(size) if mesh is None else mesh
    whole = mesh if whole is None else whole
    if whole.world_size != size:
        raise PlanError(f"the mesh {whole} is for {whole.world_size} ranks, but there are {size}")
    made: dict[Partition, AxisGroups] = {}
    groups: dict[Axes, AxisGroups] = {}
    partitions = {axes: _partition(whole, axes) for axes in dict.fromkeys((mesh.names, *over))}
    if size > 1:
        _compare(whole, partitions, rank, size)
    for axes, partition in partitions.items():
        if partition not in made:
            made[partition] = _axis_groups("+".join(axes), partition, rank)
        groups[axes] = made[partition]
    return RankMesh(mesh, whole.position(rank, mesh.names), groups)


def _partition(mesh: Mesh, axes: Axes) -> Partition:
    return tuple(sorted(tuple(sorted(ranks)) for ranks in mesh.groups(axes)))


def _compare(mesh: Mesh, over: Iterable[Axes], rank: int, size: int) -> None:
    """Compare through the store what the ranks are about to make: if it differs, torch's call waits for ranks that
    never come. Rank 0 compares, and tells the others."""
    own = f"{mesh}, communicators over {', '.join('+'.join(axes) for axes in over)}"
    default: dist.Store = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"zeroshard/mesh/{default.add(f'zeroshard/mesh/{rank}', 1)}", default)
    store.set(str(rank), own)
    with _meeting():
        if rank == 0:
            store.wait([str(other) for other in range(size)], group_timeout())
            found = [store.get(str(other)).decode() for other in range(size)]
            others = [other for other in range(size) if found[other] != own]
            store.set("verdict", "" if not others else _difference(found, others))
        store.wait(["verdict"], group_timeout())
        verdict = store.get("verdict").decode()
    if verdict:
        raise PlanError(verdict)


def _difference(found: Sequence[str], others: Sequence[int]) -> str:
    said = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    return (
        f"the ranks have different meshes: rank 0 has {found[0]}, {said} not: rank {others[0]} has {found[others[0]]}; "
        "give all ranks the same mesh and plan"
    )


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
    with _meeting():
        made = dist.new_group(list(ranks), timeout=group_timeout(), group_desc=description)
    assert made is not None
    return made


@contextmanager
def _meeting() -> Iterator[None]:
    """Raises DivergenceError where the other ranks do not come in time, whatever torch raises."""
    try:
        yield
    except RuntimeError as error:  # stores and backends have kinds of their own
        raise DivergenceError(
            f"rank {dist.get_rank()} did not meet the other ranks within {group_timeout().total_seconds():g} s: they "
            "have ended, or never come to initialize() or shard(), which all ranks call "
            f"({str(error).partition(chr(10))[0]})"
        ) from error
