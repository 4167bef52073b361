"""What the mesh promises about its axes and communicators."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from zeroshard.comm.mesh import AxisGroups, Mesh, build_mesh
from zeroshard.errors import DivergenceError, UsageError


def _axes(mesh: Mesh) -> dict[str, tuple[tuple[int, ...], int]]:
    return {axis.name: (axis.ranks, axis.rank) for axis in mesh.axes}


def _sums(rank: int, world_size: int, shard_size: int | None) -> tuple[dict, dict]:
    mesh = build_mesh(shard_size)
    sums = {}
    for axis in mesh.axes:
        for group in (axis.groups.gather, axis.groups.reduce, axis.groups.control):
            if group is not None:
                value = torch.tensor([2.0**rank])
                dist.all_reduce(value, group=group)
                sums.setdefault(axis.name, set()).add(value.item())
    mesh.destroy()
    assert dist.is_initialized()
    return _axes(mesh), sums


def test_one_process_needs_no_process_group() -> None:
    mesh = build_mesh()
    assert not dist.is_initialized()
    assert _axes(mesh) == {"dp": ((0,), 0), "shard": ((0,), 0), "replicate": ((0,), 0)}
    assert mesh.axis("dp").groups == AxisGroups()
    assert mesh.store() is None
    mesh.destroy()


def test_by_default_all_ranks_shard() -> None:
    for rank, (axes, sums) in enumerate(run_ranks(3, _sums, None)):
        assert axes == {"dp": ((0, 1, 2), rank), "shard": ((0, 1, 2), rank), "replicate": ((rank,), 0)}
        assert sums == {"dp": {7.0}, "shard": {7.0}}


def test_contiguous_ranks_shard_and_strided_ranks_replicate() -> None:
    results = run_ranks(4, _sums, 2)
    assert results[2][0] == {"dp": ((0, 1, 2, 3), 2), "shard": ((2, 3), 0), "replicate": ((0, 2), 1)}
    assert [sums for _, sums in results] == [
        {"dp": {15.0}, "shard": {3.0}, "replicate": {5.0}},
        {"dp": {15.0}, "shard": {3.0}, "replicate": {10.0}},
        {"dp": {15.0}, "shard": {12.0}, "replicate": {5.0}},
        {"dp": {15.0}, "shard": {12.0}, "replicate": {10.0}},
    ]


def test_shard_groups_of_one_replicate_everywhere() -> None:
    axes, sums = run_ranks(2, _sums, 1)[1]
    assert axes == {"dp": ((0, 1), 1), "shard": ((1,), 0), "replicate": ((0, 1), 1)}
    assert sums == {"dp": {3.0}, "replicate": {3.0}}


@pytest.mark.parametrize("size", [0, 2])
def test_shard_size_must_divide_the_world(size: int) -> None:
    with pytest.raises(UsageError, match=f"shard groups of {size} ranks do not divide the world of 1"):
        build_mesh(size)


def test_an_unknown_axis_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no axis 'tp'; it has dp, shard, replicate"):
        build_mesh().axis("tp")  # pyright: ignore[reportArgumentType]


def _with_timeout(rank: int, world: int, folder: str) -> None:
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=2))
    mesh = build_mesh()
    for group in (mesh.axis("dp").groups.gather, mesh.axis("dp").groups.control):
        assert group is not None
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=2)
    if rank == 0:
        with pytest.raises(DivergenceError, match=r"rank 0 did not meet the other ranks within 2 s"):
            build_mesh()


def test_communicators_wait_as_long_as_the_default_group_and_no_longer(tmp_path: Path) -> None:
    run_ranks(2, _with_timeout, str(tmp_path), timeout=60)
