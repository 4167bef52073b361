"""`init_distributed` finds the process group in any launcher's environment, or says what is missing."""

from __future__ import annotations

import logging
import os
import queue
from datetime import timedelta
from logging.handlers import QueueHandler

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.ports import free_port
from zeroshard.cluster import rank_place, slurm_port
from zeroshard.comm import init_distributed
from zeroshard.errors import UsageError


def _environment(scheme: str, rank: int, world: int, port: int) -> dict[str, str]:
    r, w = str(rank), str(world)
    if scheme == "slurm":
        return {
            "SLURM_JOB_ID": str(port),
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": r,
            "SLURM_STEP_NUM_TASKS": w,
            "SLURM_LOCALID": r,
            "SLURM_NODEID": "0",
            "SLURM_STEP_TASKS_PER_NODE": w,
            "SLURM_STEP_NODELIST": "localhost",
        }
    if scheme == "mpich":
        return {"PMI_RANK": r, "PMI_SIZE": w, "MPI_LOCALRANKID": r, "MPI_LOCALNRANKS": w, "MASTER_PORT": str(port)}
    if scheme == "openmpi":
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        return {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, (r, w, r, w), strict=True)} | {
            "MASTER_PORT": str(port)
        }
    return {"RANK": r, "WORLD_SIZE": w, "LOCAL_RANK": r, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def _clear() -> None:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def _meet(rank: int, world: int, ports: dict[str, int]) -> dict[str, tuple[float, int, str]]:
    met: dict[str, tuple[float, int, str]] = {}
    for scheme, port in ports.items():
        _clear()
        chosen = _environment(scheme, rank, world, port)
        os.environ.update(chosen)
        init_distributed(verbose=False, timeout=timedelta(seconds=60))
        init_distributed()  # a second call finds the group
        value = torch.full((1,), float(rank + 1))
        dist.all_reduce(value)
        met[scheme] = (value.item(), dist.get_rank(), os.environ["LOCAL_WORLD_SIZE" if scheme != "env" else "RANK"])
        for name in chosen:
            os.environ.pop(name, None)
    return met


def test_ranks_meet_whatever_started_them() -> None:
    ports = {scheme: free_port() for scheme in ("env", "openmpi", "mpich", "slurm")}
    for rank, met in enumerate(run_ranks(2, _meet, ports)):
        assert met["env"] == (3.0, rank, str(rank))
        assert met["openmpi"] == met["mpich"] == met["slurm"] == (3.0, rank, "2")


def _alone(rank: int, world: int) -> tuple[int, int, str, bool, bool]:
    _clear()
    model = nn.Linear(4, 4)
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zeroshard.initialize(model=model, config=config)
    before = dist.is_initialized()
    engine.destroy()
    engine, *_ = zeroshard.initialize(model=nn.Linear(4, 4), config=config, dist_init_required=True)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.destroy()
    return dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], before, dist.get_backend() == "gloo"


def test_a_process_without_a_launcher_is_alone_and_gets_a_group_when_it_asks() -> None:
    assert run_ranks(1, _alone) == [(0, 1, "0", False, True)]


def _apart(rank: int, world: int) -> bool:
    """The launcher's variables are there, and nobody has made the group that they describe."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    with pytest.raises(UsageError, match=r"dist_init_required=False\): there is no process group, and every rank"):
        zeroshard.initialize(model=nn.Linear(4, 4), config=config, dist_init_required=False)
    with pytest.raises(UsageError, match="dist_init_required=False, but there is no process group"):
        init_distributed(dist_init_required=False)
    return dist.is_initialized()


def test_ranks_are_not_trained_apart_where_the_caller_was_to_make_the_group() -> None:
    assert run_ranks(2, _apart) == [False, False]


def _made_before(rank: int, world: int) -> float:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zeroshard.initialize(model=nn.Linear(4, 4), config=config, dist_init_required=False)
    init_distributed(dist_init_required=False)
    return engine.train_batch_size()


def test_a_group_that_the_caller_has_made_is_taken() -> None:
    assert run_ranks(2, _made_before) == [2, 2]


def _impossible(rank: int, world: int) -> list[str]:
    _clear()
    said: list[str] = []
    for variables, arguments in (
        ({"RANK": "1"}, {}),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"dist_backend": "nccl"}),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"dist_backend": "glue"}),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"dist_backend": 3}),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"timeout": 0}),
        ({}, {"timeout": "5"}),
        ({}, {"timeout": float("nan")}),
        ({}, {"timeout": 1e18}),
        ({}, {"rank": "0", "world_size": 1}),
        ({}, {"distributed_port": 65536}),
        ({}, {"rank": 0, "world_size": 2}),
        ({}, {"dist_init_required": False}),
    ):
        os.environ.update(variables)
        try:
            init_distributed(**arguments)
        except UsageError as error:
            said.append(str(error))
        for name in variables:
            os.environ.pop(name, None)
    return said


@pytest.mark.skipif(torch.cuda.is_available(), reason="nccl is there")
def test_what_can_not_be_is_told_before_anything_waits() -> None:
    (said,) = run_ranks(1, _impossible)
    assert [line.split(";")[0] for line in said] == [
        "the environment sets RANK but not WORLD_SIZE: start the script with `zeroshard run`, or set all of them, or "
        "none to run as a single process",
        "init_distributed: backend nccl needs a GPU and a torch built for it",
        "init_distributed: no backend 'glue'",
        "init_distributed(dist_backend=...): the name of a backend is needed, got 3",
        "init_distributed: timeout 0: a time above 0, of a year at most",
        "init_distributed(timeout=...): a timedelta or seconds is needed, got '5'",
        "init_distributed: timeout nan: a time above 0, of a year at most",
        "init_distributed: timeout 1e+18: a time above 0, of a year at most",
        "init_distributed(rank=...): a whole number is needed, got '0'",
        "init_distributed: distributed_port 65536: ports are from 1 to 65535",
        "init_distributed: rank and world_size go with init_method",
        "init_distributed: dist_init_required=False, but there is no process group",
    ]


def _unmet(rank: int, world: int, port: int) -> str:
    _clear()
    os.environ.update(_environment("env", 1, 2, port))
    try:
        init_distributed(timeout=1)
    except UsageError as error:
        return str(error)
    return "no error"


def _unknown(rank: int, world: int, port: int) -> list[str]:
    _clear()
    os.environ.update(_environment("env", 1, 2, port), MASTER_ADDR="no-such-host.invalid")
    heard: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logging.getLogger("zeroshard").addHandler(QueueHandler(heard))
    with pytest.raises(UsageError, match="did not meet the others"):
        init_distributed(timeout=1)
    return [heard.get().getMessage() for _ in range(heard.qsize())]


def test_a_host_without_an_address_is_named_before_it_is_waited_for() -> None:
    (said,) = run_ranks(1, _unknown, free_port())
    assert any("MASTER_ADDR 'no-such-host.invalid' is no host that is known here" in line for line in said)


def test_ranks_that_do_not_meet_say_where_they_waited() -> None:
    port = free_port()
    (said,) = run_ranks(1, _unmet, port)
    assert said.startswith(f"rank 1 of 2 (torchrun) did not meet the others at localhost:{port}: ")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "2"}, "sets WORLD_SIZE but not RANK"),
        ({"LOCAL_RANK": "0"}, "sets LOCAL_RANK but not RANK and WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2 with WORLD_SIZE=2: ranks are from 0 to 1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x: expected a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "not where rank 0 is: start the script with `zeroshard run`"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "not LOCAL_RANK, which says which GPU is rank 0's"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "pass the host of rank 0 to mpirun as -x MASTER_ADDR=HOST",
        ),
        ({"PMI_RANK": "0"}, "sets PMI_RANK but not PMI_SIZE"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "65536"},
            "MASTER_PORT=65536: ports are from 1 to 65535",
        ),
    ],
)
def test_a_half_set_environment_is_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rank_place(environ)


def test_a_slurm_steps_ranks_agree_on_host_and_port() -> None:
    step = {"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "5"}
    step |= {"SLURM_STEP_NODELIST": "gpu[08-09,11]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    first = rank_place({**step, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    last = rank_place({**step, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"})
    assert first is not None
    assert last is not None
    assert (first.local_world_size, last.local_world_size) == (2, 1)
    assert first.master_addr == last.master_addr == "gpu08"
    assert first.master_port == last.master_port == slurm_port(step)
    assert slurm_port({**step, "SLURM_JOB_ID": "1235"}) != slurm_port(step)


def test_a_batch_script_outside_of_a_step_is_no_rank() -> None:
    assert rank_place({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None
