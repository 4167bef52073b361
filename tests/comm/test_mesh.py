"""What a mesh promises about its axes, and a rank's view of it about communicators."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.distributed import run_ranks
from zeroshard.comm.device_mesh import device_mesh_of, mesh_from
from zeroshard.comm.mesh import AxisGroups, build_mesh
from zeroshard.errors import DivergenceError, PlanError
from zeroshard.mesh import DATA, REPLICATE, SHARD, Mesh, MeshAxis

CUBE = Mesh((MeshAxis("pp", 2), MeshAxis(REPLICATE, 2), MeshAxis(SHARD, 3)))


def test_groups_partition_the_ranks_and_positions_count_them() -> None:
    assert CUBE.groups((SHARD,)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert CUBE.groups((REPLICATE,)) == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    assert CUBE.groups(("pp", SHARD))[0] == [0, 1, 2, 6, 7, 8]
    for over in ((SHARD,), (REPLICATE,), DATA, ("pp", SHARD), CUBE.names, ()):
        for ranks in CUBE.groups(over):
            assert len(ranks) == CUBE.size(over)
            assert [CUBE.position(rank, over) for rank in ranks] == list(range(len(ranks)))


def test_of_ranks_that_hold_the_same_part_one_is_first() -> None:
    for axes in ((SHARD,), DATA, ("pp", SHARD)):
        firsts = [rank for rank in range(CUBE.world_size) if CUBE.first(rank, axes)]
        assert sorted(CUBE.position(rank, axes) for rank in firsts) == list(range(CUBE.size(axes)))


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ([MeshAxis("diagonal", 2)], "'diagonal': each of pp, dp_replicate"),
        ([MeshAxis(SHARD, 2), MeshAxis(SHARD, 2)], "'dp_shard': each of"),
        ([MeshAxis(SHARD, 0)], "'dp_shard' has 0 ranks"),
    ],
)
def test_axes_that_make_no_sense_are_refused(axes: list[MeshAxis], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Mesh(tuple(axes))


def test_an_unknown_axis_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="no axis 'tp'; it has dp_replicate, dp_shard"):
        Mesh.data_parallel(4).size(("tp",))


def _sums(rank: int, world: int, shard: int | None) -> dict[str, set[float]]:
    ranks = build_mesh(Mesh.data_parallel(world, shard), (DATA, (SHARD,), (REPLICATE,)))
    sums: dict[str, set[float]] = {}
    for axes, groups in ranks.groups.items():
        for group in groups.all():
            value = torch.tensor([2.0**rank])
            dist.all_reduce(value, group=group)
            sums.setdefault("+".join(axes), set()).add(value.item())
    ranks.destroy()
    assert dist.is_initialized()
    return sums


def test_one_process_needs_no_process_group() -> None:
    mesh = build_mesh()
    assert not dist.is_initialized()
    assert (mesh.rank, mesh.world_size, mesh.over(DATA)) == (0, 1, AxisGroups())
    assert mesh.store() is None
    mesh.destroy()


def test_by_default_all_ranks_shard() -> None:
    assert run_ranks(3, _sums, None) == [{"dp_replicate+dp_shard": {7.0}, "dp_shard": {7.0}}] * 3


def test_contiguous_ranks_shard_and_strided_ranks_replicate() -> None:
    everyone = {"dp_replicate+dp_shard": {15.0}}
    assert run_ranks(4, _sums, 2) == [
        {**everyone, "dp_shard": {3.0}, "dp_replicate": {5.0}},
        {**everyone, "dp_shard": {3.0}, "dp_replicate": {10.0}},
        {**everyone, "dp_shard": {12.0}, "dp_replicate": {5.0}},
        {**everyone, "dp_shard": {12.0}, "dp_replicate": {10.0}},
    ]


def _shares(rank: int, world: int) -> int:
    """How many communicators there are for axes with the same ranks."""
    mesh = build_mesh(Mesh.data_parallel(world), (DATA, (SHARD,), (REPLICATE,)))
    return len({id(group) for groups in mesh.groups.values() for group in groups.all()})


def test_axes_with_the_same_ranks_share_communicators() -> None:
    assert run_ranks(2, _shares) == [3, 3]


def _different(rank: int, world: int) -> None:
    """Odd ranks come with subgroups, and with one mesh all go on afterwards."""
    for over in ((), (DATA, (SHARD,))):
        with pytest.raises(PlanError, match=r"rank 0 has .*dp_shard 4.*, ranks 1, 3 not: rank 1 has .*dp_shard 2"):
            build_mesh(Mesh.data_parallel(world, 2 if rank % 2 else None), over)
    with pytest.raises(PlanError, match=r"have different meshes: .* rank 2 not: .*over .*, dp_shard; give"):
        build_mesh(Mesh.data_parallel(world), [(SHARD,)] if rank == 2 else [])
    assert build_mesh(Mesh.data_parallel(world)).world_size == world


def test_ranks_with_different_meshes_are_told_so_before_they_wait_for_each_other() -> None:
    run_ranks(4, _different, timeout=60)


def test_a_mesh_for_other_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match=r"the mesh dp_replicate 1 x dp_shard 2 is for 2 ranks, but there are 1"):
        build_mesh(Mesh.data_parallel(2))


def _device_meshes(rank: int, world: int) -> None:
    for sizes, names, expected in (
        ((2, 2), DATA, Mesh.data_parallel(4, 2)),
        ((4,), ("dp",), Mesh.data_parallel(4)),
        ((4,), (REPLICATE,), Mesh.data_parallel(4, 1)),
        ((2, 2), ("fsdp", "tp"), Mesh((MeshAxis(REPLICATE, 1), MeshAxis(SHARD, 2), MeshAxis("tp", 2)))),
    ):
        assert mesh_from(init_device_mesh("cpu", sizes, mesh_dim_names=names)) == expected
        assert mesh_from(device_mesh_of(expected, "cpu")) == expected
    for given, words in (
        (init_device_mesh("cpu", (4,)), "has no mesh_dim_names"),
        (init_device_mesh("cpu", (4,), mesh_dim_names=("up",)), "mesh axis 'up'"),
        (DeviceMesh("cpu", [0, 2, 1, 3], mesh_dim_names=("dp",)), r"\[0, 2, 1, 3\], but all 4 are needed"),
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=DATA)[SHARD], "but all 4 are needed"),
    ):
        with pytest.raises(PlanError, match=words):
            mesh_from(given)


def test_a_device_mesh_is_read_and_given_back() -> None:
    run_ranks(4, _device_meshes)


def _with_timeout(rank: int, world: int, folder: str) -> None:
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=2))
    mesh = build_mesh()
    for group in (mesh.over(DATA).gather, mesh.over(DATA).control):
        assert group is not None
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=2)
    if rank == 0:
        with pytest.raises(DivergenceError, match=r"rank 0 did not meet the other ranks within 2 s"):
            build_mesh()


def test_communicators_wait_as_long_as_the_default_group_and_no_longer(tmp_path: Path) -> None:
    run_ranks(2, _with_timeout, str(tmp_path), timeout=60)
