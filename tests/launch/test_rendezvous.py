"""A node finds its place in the environment of a pod, a Slurm step or an mpirun."""

from __future__ import annotations

import pytest

from zeroshard.cluster import NodePlace, expand_hosts
from zeroshard.errors import UsageError
from zeroshard.launch.rendezvous import Rendezvous, find_place

_STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "gpu[3-4],login",
}
_POD = {"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "23456"}
_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


@pytest.mark.parametrize(
    ("rendezvous", "environ", "given", "place"),
    [
        (Rendezvous.ENV, {}, NodePlace(), NodePlace(1, 0)),
        (Rendezvous.ENV, {**_STEP, **_POD, **_MPI}, NodePlace(), NodePlace(1, 0)),
        (
            Rendezvous.ENV,
            {"PET_NNODES": "2:2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_NPROC_PER_NODE": "4"},
            NodePlace(),
            NodePlace(2, 1, "m", None, "4"),
        ),
        (Rendezvous.KUBERNETES, _POD, NodePlace(), NodePlace(2, 1, "job-0.job", 23456)),
        (Rendezvous.KUBERNETES, _POD, NodePlace(master_port=1, nproc="8"), NodePlace(2, 1, "job-0.job", 1, "8")),
        (
            Rendezvous.KUBERNETES,
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "1"},
            NodePlace(),
            NodePlace(2, 1, "m", 1),
        ),
        (Rendezvous.SLURM, _STEP, NodePlace(), NodePlace(3, 2, "gpu3", 15000 + 77 * 7)),
        (Rendezvous.OPENMPI, {**_MPI, "MASTER_ADDR": "a"}, NodePlace(), NodePlace(2, 1, "a")),
        (Rendezvous.OPENMPI, _MPI, NodePlace(master_addr="b", master_port=9), NodePlace(2, 1, "b", 9)),
    ],
)
def test_the_environment_fills_what_the_options_leave_open(
    rendezvous: Rendezvous, environ: dict[str, str], given: NodePlace, place: NodePlace
) -> None:
    assert find_place(given, rendezvous, environ) == place


@pytest.mark.parametrize(
    ("rendezvous", "environ", "given", "message"),
    [
        (Rendezvous.KUBERNETES, {"NNODES": "2"}, NodePlace(), "lacks JOB_COMPLETION_INDEX .*, MASTER_ADDR"),
        (Rendezvous.KUBERNETES, {**_POD, "NNODES": "two"}, NodePlace(), "NNODES=two: expected a whole number"),
        (Rendezvous.KUBERNETES, {**_POD, "JOB_COMPLETION_INDEX": "2"}, NodePlace(), "--node-rank 2: with --nnodes 2"),
        (Rendezvous.KUBERNETES, _POD, NodePlace(nnodes=3), "--nnodes 3: the environment says 2 nodes"),
        (Rendezvous.SLURM, {}, NodePlace(), "this is no Slurm step; start it with srun"),
        (Rendezvous.SLURM, {**_STEP, "SLURM_STEP_NUM_TASKS": "6"}, NodePlace(), "6 tasks on 3 nodes"),
        (Rendezvous.OPENMPI, {}, NodePlace(), "not started by Open MPI's mpirun"),
        (Rendezvous.OPENMPI, {**_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, NodePlace(), "2 processes on this node"),
        (Rendezvous.ENV, {"PET_NNODES": "2"}, NodePlace(), "the nodes meet at node 0"),
    ],
)
def test_a_place_that_can_not_be_is_an_error(
    rendezvous: Rendezvous, environ: dict[str, str], given: NodePlace, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        find_place(given, rendezvous, environ)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[1,3-4]-ib,m2", ["n1-ib", "n3-ib", "n4-ib", "m2"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
    ],
)
def test_slurms_short_form_of_hosts_is_spelled_out(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts
