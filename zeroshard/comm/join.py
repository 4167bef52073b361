"""`init_distributed`: join the process group that the launcher's environment describes.

    torchrun, Open MPI, MPICH, Slurm   -->  RankPlace  -->  torch's variables  -->  init_process_group
    none of them                       -->  a group of one, in memory

torch's own `init_process_group` knows torchrun's variables alone and waits for minutes when one of them is wrong. What
can be known before anything is sent is checked here. A group of one uses a store in memory: with a port, two notebooks
on one machine would collide.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.arguments import need_kind
from zeroshard.cluster import DEFAULT_PORT, RankPlace, rank_place
from zeroshard.elastic.place import place_in
from zeroshard.errors import UsageError

_LOGGER = logging.getLogger("zeroshard")
_LONGEST = 365 * 24 * 3600.0
"""Seconds; more overflows what torch counts in."""
_BACKENDS = ("auto", "nccl", "gloo", "mpi", "ucc", "xccl")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make torch's default process group, unless there is one; called by all ranks, with DeepSpeed's arguments.

    Args:
        dist_backend: `nccl`, `gloo`, a torch backend string such as `cpu:gloo,cuda:nccl`, or `auto` (the default):
            both of these where there is a GPU, gloo elsewhere.
        auto_mpi_discovery: also read the variables of MPI and Slurm, not torchrun's alone.
        distributed_port: where rank 0 listens if the environment does not say.
        verbose: log where the place in the group came from.
        timeout: of a collective; a timedelta, or seconds.
        init_method: a URL for torch (`tcp://host:port`, `file:///path`), with `rank` and `world_size`.
        dist_init_required: False makes nothing, and is an error if there is no group.
        config: accepted for DeepSpeed's sake; a config has nothing to say here.

    Raises:
        UsageError: the environment is half-set or impossible, the backend is not there, or the ranks did not meet.
    """
    if not dist.is_available():
        raise UsageError("this build of torch has no torch.distributed; install a usual one")
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise UsageError("init_distributed: dist_init_required=False, but there is no process group; make one first")
    backend, limit = _backend(dist_backend), _limit(timeout)
    for name, number in (("rank", rank), ("world_size", world_size), ("distributed_port", distributed_port)):
        need_kind(number, int, f"init_distributed({name}=...)", "a whole number")
    if not 0 < distributed_port < 2**16:
        raise UsageError(f"init_distributed: distributed_port {distributed_port}: ports are from 1 to 65535")
    if init_method is not None:
        _join_url(backend, init_method, rank, world_size, limit)
        return
    if rank >= 0 or world_size >= 0:
        raise UsageError("init_distributed: rank and world_size go with init_method; without it the environment says")
    place = rank_place(os.environ, distributed_port)
    if place is not None and place.source != "torchrun" and not auto_mpi_discovery:
        place = None
    if place is None or (place.world_size == 1 and "MASTER_ADDR" not in os.environ):
        _join_alone(backend, limit, verbose, place)
    else:
        _join_others(backend, place, limit, verbose)


def _limit(timeout: object) -> timedelta | None:
    if timeout is None:
        return None
    need_kind(timeout, (int, float, timedelta), "init_distributed(timeout=...)", "a timedelta or seconds")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, (int, float)) or not 0 < seconds <= _LONGEST:
        raise UsageError(f"init_distributed: timeout {timeout}: a time above 0, of a year at most")
    return timedelta(seconds=seconds)


def _backend(name: str | None) -> str:
    if name is None or name == "auto":
        return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    need_kind(name, str, "init_distributed(dist_backend=...)", "the name of a backend")
    for part in name.split(","):
        backend = part.rpartition(":")[2]
        if backend not in _BACKENDS and backend not in dist.Backend.backend_list:
            raise UsageError(f"init_distributed: no backend {backend!r}; there are {', '.join(_BACKENDS)}")
        if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise UsageError("init_distributed: backend nccl needs a GPU and a torch built for it; use gloo, or auto")
    return name


def _join_url(backend: str, url: str, rank: int, world_size: int, limit: timedelta | None) -> None:
    if not 0 <= rank < world_size and not url.startswith("env://"):
        raise UsageError(f"init_distributed: {url} needs rank and world_size; got rank {rank} of {world_size}")
    try:
        dist.init_process_group(backend, init_method=url, rank=rank, world_size=world_size, timeout=limit)
    except dist.DistError as error:
        raise UsageError(f"rank {rank} of {world_size} did not meet the others at {url}: {_first(error)}") from error


def _join_alone(backend: str, limit: timedelta | None, verbose: bool, place: RankPlace | None) -> None:
    """A group of this process, for notebooks and for scripts that run without a launcher."""
    os.environ.update(RANK="0", WORLD_SIZE="1")
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    if verbose:
        source = place.source if place is not None else "no launcher's variables"
        _LOGGER.warning("%s: a process group of this process alone; `zeroshard run` starts several ranks", source)


def _warn_unknown_host(place: RankPlace) -> None:
    """Say that rank 0's host has no address. No error: a cluster may make the name when it starts the host."""
    try:
        socket.getaddrinfo(place.master_addr, place.master_port)
    except OSError as error:
        _LOGGER.warning(
            "rank %s: MASTER_ADDR %r is no host that is known here (%s); waiting for it until the group's timeout",
            *(place.rank, place.master_addr, error.strerror or error),
        )


def _join_others(backend: str, place: RankPlace, limit: timedelta | None, verbose: bool) -> None:
    if torch.cuda.is_available():
        _take_device(place)
    # The names that torch, and libraries beside it, read.
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))
    os.environ.update(MASTER_ADDR=place.master_addr, MASTER_PORT=str(place.master_port))
    if place.local_world_size is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(place.local_world_size)
    where = f"{place.master_addr}:{place.master_port}"
    _warn_unknown_host(place)
    try:
        dist.init_process_group(backend, timeout=limit, **_store_of_job())
    except dist.DistError as error:
        raise UsageError(
            f"rank {place.rank} of {place.world_size} ({place.source}) did not meet the others at {where}: "
            f"{_first(error)}; is rank 0 there, and the port free and open?"
        ) from error
    if verbose and place.rank == 0:
        _LOGGER.info("%d ranks of %s met at %s, backend %s", place.world_size, place.source, where, backend)


def _store_of_job() -> dict[str, Any]:
    """In an elastic job its own store, which outlives the node that torch's env:// would meet at."""
    place = place_in(os.environ)
    if place is None:
        return {}
    address, port = place.job_store
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    return {
        "store": dist.PrefixStore(f"zeroshard/round/{place.round}", store),
        "rank": place.rank,
        "world_size": place.world_size,
    }


def _take_device(place: RankPlace) -> None:
    """Make the rank's GPU the current one before NCCL asks for it. A rank that sees one GPU has no choice."""
    count = torch.cuda.device_count()
    if count > 1 and place.local_rank >= count:
        raise UsageError(f"local rank {place.local_rank}, but this process sees {count} GPUs; start fewer ranks")
    torch.cuda.set_device(place.local_rank if count > 1 else 0)


def _first(error: BaseException) -> str:
    return str(error).partition("\n")[0]
