"""Which ranks share what: the axes of the mesh and their communicators.

    8 ranks, shard groups of 4           axis 'shard'      axis 'replicate'     axis 'dp'
        0 1 2 3                          {0 1 2 3}         {0 4} {1 5}          {0 .. 7}
        4 5 6 7                          {4 5 6 7}         {2 6} {3 7}

Each axis has three communicators: gather and reduce, so that an all-gather never queues behind a reduce-scatter, and
control for the small messages between steps. Without a split 'shard' is 'dp' itself and 'replicate' has size 1.

torch's DeviceMesh was rejected as the base: it makes one communicator per axis, wants a device type and binds the
device, and has no form for one process without a process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from zeroshard.errors import DivergenceError, UsageError

AxisName = Literal["dp", "shard", "replicate"]


@dataclass(frozen=True)
class AxisGroups:
    """The communicators of one axis; all None where the axis has size 1 and nothing is ever sent."""

    gather: dist.ProcessGroup | None = None
    reduce: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Axis:
    """The ranks that this rank meets along one axis. `rank` is its own place in `ranks`, which are global ranks."""

    name: AxisName
    ranks: tuple[int, ...]
    rank: int
    groups: AxisGroups

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return len(self.ranks)


@dataclass(frozen=True)
class Mesh:
    """The mesh as this rank sees it. Equal on all ranks but for their places in it."""

    world_size: int
    rank: int
    axes: tuple[Axis, ...]

    def axis(self, name: AxisName) -> Axis:
        """The axis 'dp' (all data-parallel ranks), 'shard' (one copy of the state) or 'replicate' (the same shard)."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise UsageError(f"the mesh has no axis {name!r}; it has {', '.join(axis.name for axis in self.axes)}")

    def store(self) -> dist.Store | None:
        """The store through which the ranks of the mesh met, for the watchdog; None for a single rank."""
        control = self.axis("dp").groups.control
        return None if control is None else control.get_group_store()

    def destroy(self) -> None:
        """Destroy the communicators that the mesh made; the default process group stays."""
        if not dist.is_initialized():
            return  # they went with it
        groups = {id(g): g for a in self.axes for g in (a.groups.gather, a.groups.reduce, a.groups.control) if g}
        for group in groups.values():
            dist.destroy_process_group(group)


def world_size() -> int:
    """Ranks of the default process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def build_mesh(shard_size: int | None = None) -> Mesh:
    """The mesh over the default process group, or over this process alone when there is none.

    `shard_size` ranks with consecutive numbers hold one copy of the sharded state (MiCS, arXiv:2205.00119; the hybrid
    shard of FSDP, arXiv:2304.11277); by default all ranks do. Called by all ranks in the same order, since it makes
    communicators. Raises UsageError unless `shard_size` divides the world size.
    """
    joined = dist.is_available() and dist.is_initialized()
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if joined else (1, 0)
    size = world_size if shard_size is None else shard_size
    if size < 1 or world_size % size:
        raise UsageError(f"shard groups of {size} ranks do not divide the world of {world_size}; use a divisor of it")
    everyone = list(range(world_size))
    dp = _axis("dp", [everyone], rank)
    if size == world_size:
        shard = Axis("shard", dp.ranks, dp.rank, dp.groups)
        replicate = _axis("replicate", [[r] for r in everyone], rank)
    elif size == 1:
        shard = _axis("shard", [[r] for r in everyone], rank)
        replicate = Axis("replicate", dp.ranks, dp.rank, dp.groups)
    else:
        shard = _axis("shard", [everyone[start : start + size] for start in range(0, world_size, size)], rank)
        replicate = _axis("replicate", [everyone[start::size] for start in range(size)], rank)
    return Mesh(world_size, rank, (dp, shard, replicate))


def _axis(name: AxisName, partition: Sequence[Sequence[int]], rank: int) -> Axis:
    """The axis whose groups are `partition`; every rank makes every group, as c10d demands."""
    mine = next(ranks for ranks in partition if rank in ranks)
    groups = AxisGroups()
    if len(mine) > 1:
        made: dict[str, dist.ProcessGroup] = {}
        for purpose in ("gather", "reduce", "control"):
            for ranks in partition:
                group = _new_group(ranks, f"zeroshard {name} {purpose}")
                if rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    made[purpose] = group
        groups = AxisGroups(made["gather"], made["reduce"], made["control"])
    return Axis(name, tuple(mine), mine.index(rank), groups)


def _new_group(ranks: Sequence[int], description: str) -> dist.ProcessGroup | int:
    """A communicator with the default group's timeout, which the program has chosen; torch would take its own.

    Raises:
        DivergenceError: not all ranks have come here within that time.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    timeout: timedelta = everyone._get_backend(everyone._device_types[0]).options._timeout
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
