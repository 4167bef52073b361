"""Run a function on N real processes joined by gloo, from inside a pytest test.

    forkserver (torch, pytest and all of zeroshard imported once per pytest process, no threads)
        |-- fork --> rank 0: FileStore, gloo, fn(0, world_size, *args) --pipe--> result or traceback
        |-- fork --> rank 1: ...

A fork of a server that has already imported what a rank needs (preload.py) starts in some hundredths of a second; a
spawned process imports torch anew, seconds on a busy machine. Forking the pytest process itself was rejected: it has
threads by then (OpenMP, autograd), and a fork of a process with threads may hang. Workers kept alive between tests were
rejected too: a test that breaks a process group or leaves a hook behind must not reach the next one.

Every rank meets the others in a file in a fresh directory, so there are no ports to collide. It is in memory where the
system has a folder for that: a write that fails half way, on a full disk say, leaves a record that torch's FileStore
reads without end. A TCPStore was rejected: its server asks for the name of each address that connects, and waits for
5 seconds where a name service loses one of many questions.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ["pytest", "tests.support.preload"]

# After the first failure the others get this long to notice by themselves: their errors are shown below the first.
_GRACE_SECONDS = 3.0
_NOT_CONNECTED = "Gloo connectFullMesh failed"
_DUMP_SECONDS = 1.0
_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class _Job:
    """What a rank needs to know; `payload` is the pickled (fn, args), so that unpickling errors are reported too."""

    rank: int
    world_size: int
    directory: str
    store: str
    timeout: float
    env: Mapping[str, str]
    payload: bytes
    backend: str

    @property
    def stacks(self) -> Path:
        return Path(self.directory) / f"stacks-{self.rank}"


@dataclass(frozen=True)
class _Failure:
    rank: int
    when: float
    text: str


@dataclass
class _Rank:
    job: _Job
    process: BaseProcess
    pipe: Connection


def run_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: object,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    backend: str = "gloo",
) -> list[T]:
    """Call `fn(rank, world_size, *args)` in `world_size` processes that share a group; results in rank order.

    `fn` is a module-level function; it, its arguments and its result are pickled. Each process has one thread, the
    default process group and torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE), then `env` on top.
    Over gloo alone a rank sees no GPU, so that a test means the same on a machine with one.
    Raises AssertionError with the traceback of the rank that failed first, or, after `timeout` seconds, with the
    stacks of every rank; no process is left behind in any case.
    """
    payload = _dump(fn, args)
    for again in (True, False):
        try:
            return _run_once(world_size, payload, timeout, env or {}, backend)
        except AssertionError as error:
            # gloo could not connect the processes, as happens on a busy machine, before any code of the test ran.
            if not again or _NOT_CONNECTED not in str(error):
                raise
    raise AssertionError


def _run_once(world_size: int, payload: bytes, timeout: float, env: Mapping[str, str], backend: str) -> list[Any]:
    with (
        tempfile.TemporaryDirectory(prefix="ranks-") as directory,
        tempfile.TemporaryDirectory(prefix="ranks-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None) as meeting,
    ):
        shared = (world_size, directory, f"{meeting}/store", timeout, dict(env), payload, backend)
        jobs = [_Job(rank, *shared) for rank in range(world_size)]
        ranks: list[_Rank] = []
        try:
            for job in jobs:
                ranks.append(_start(job))
            return [pickle.loads(result) for result in _collect(ranks, timeout)]
        finally:
            _end(ranks)


def _dump(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    try:
        # Plain pickle and not a Process argument: the latter would pass tensors as shared memory handles.
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(f"run_ranks needs a module-level function and picklable arguments: {error}") from error


def start_process(target: Callable[..., None], *args: object) -> tuple[BaseProcess, Connection]:
    """A process of its own that runs `target(*args, connection)`, to be killed say; and the other end of that."""
    _CONTEXT.set_forkserver_preload(_PRELOAD)
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _start(job: _Job) -> _Rank:
    _CONTEXT.set_forkserver_preload(_PRELOAD)
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_rank_main, args=(job, theirs), daemon=True)
    process.start()
    theirs.close()  # else the death of the rank would not be seen as end of file
    return _Rank(job, process, ours)


def _collect(ranks: list[_Rank], timeout: float) -> list[bytes]:
    """The pickled result of every rank, or AssertionError."""
    deadline = time.monotonic() + timeout
    results: dict[int, bytes] = {}
    failures: list[_Failure] = []
    pending = {rank.pipe: rank for rank in ranks}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            outcome = _receive(rank)
            if isinstance(outcome, _Failure):
                if not failures:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                failures.append(outcome)
            else:
                results[rank.job.rank] = outcome
    hanging = list(pending.values())
    if failures:
        raise AssertionError(_failure_message(failures, hanging))
    if hanging:
        raise AssertionError(_timeout_message(ranks, hanging, timeout))
    for rank in ranks:
        rank.pipe.send_bytes(b"all done")
    return [results[rank.job.rank] for rank in ranks]


def _receive(rank: _Rank) -> bytes | _Failure:
    try:
        kind, when, body = pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.process.join(_GRACE_SECONDS)
        # Peers notice a death as fast as we do, and it is the cause of what they report within the same second.
        when = time.time() - _GRACE_SECONDS
        return _Failure(rank.job.rank, when, f"died without a report: {_exit_text(rank.process.exitcode)}")
    return body if kind == "result" else _Failure(rank.job.rank, when, body)


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _failure_message(failures: list[_Failure], hanging: list[_Rank]) -> str:
    first, *others = sorted(failures, key=lambda failure: failure.when)
    lines = [f"rank {first.rank} failed first:", first.text.rstrip()]
    lines += [f"then rank {other.rank}: {other.text.rstrip().splitlines()[-1]}" for other in others]
    lines += [f"then rank {rank.job.rank}: still running {_GRACE_SECONDS:g} s later, killed" for rank in hanging]
    return "\n".join(lines)


def _timeout_message(ranks: list[_Rank], hanging: list[_Rank], timeout: float) -> str:
    for rank in hanging:
        if rank.process.pid is not None and rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(_DUMP_SECONDS)
    lines = [f"no result after {timeout:g} s"]
    for rank in ranks:
        if rank not in hanging:
            lines.append(f"rank {rank.job.rank} had returned")
            continue
        dump = rank.job.stacks.read_text() if rank.job.stacks.exists() else "had not started"
        lines.append(f"rank {rank.job.rank} hung:\n{dump.rstrip()}")
    return "\n".join(lines)


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.pipe.close()
        # A rank whose result was taken leaves by itself when it reads "all done"; the kill is for all the others.
        rank.process.join(0.0 if sys.exc_info()[0] else _GRACE_SECONDS)
        rank.process.kill()
        rank.process.join()
        rank.process.close()


def _rank_main(job: _Job, pipe: Connection) -> None:
    with job.stacks.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            outcome = ("result", time.time(), _call(job))
        except BaseException:  # the test sees SystemExit and KeyboardInterrupt of a rank as failures, too
            outcome = ("failure", time.time(), traceback.format_exc())
        pipe.send_bytes(pickle.dumps(outcome))
        if outcome[0] == "result":
            _wait_for_others(pipe)
        sys.stdout.flush()
        sys.stderr.flush()
        # No tear-down: a failed rank must vanish as a dead process does, and destroying a group may wait for peers.
        os._exit(0 if outcome[0] == "result" else 1)


def _call(job: _Job) -> bytes:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        OMP_NUM_THREADS="1",
    )
    # Without it gloo resolves the host's name, which fails or is slow on machines with no such entry.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if job.backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(job.env)
    fn, args = pickle.loads(job.payload)
    dist.init_process_group(
        job.backend,
        store=dist.FileStore(job.store, job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout),
    )
    return pickle.dumps(fn(job.rank, job.world_size, *args))


def _wait_for_others(pipe: Connection) -> None:
    """Keep the sockets open until all ranks have returned: a peer may still be in its last collective."""
    try:
        pipe.recv_bytes()
    except EOFError:
        return  # the test is over: another rank failed
