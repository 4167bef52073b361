"""Start the ranks of this node and stay until they have ended, through torchrun's elastic agent.

    launch() -> torch.distributed.launcher.api.launch_agent -> one runner.py per rank -> the user's script

The agent brings rendezvous, the environment of the ranks, restarts and signals. What is ours: the watch that knows the
first failure, and the report. Calling the `torchrun` command was rejected: its summary comes last, and its thread
count of 1 can't be told from a user's choice.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from zeroshard.errors import UsageError
from zeroshard.launch import report, runner
from zeroshard.launch.watch import Death, RankProcess, RankWatch

# Ctrl-C and SIGTERM: how long a rank may take to end by itself before SIGKILL. Torch's default is 30.
_SHUTDOWN_SECONDS = "10"
_MULTI_NODE_PORT = 29500


@dataclass(frozen=True)
class Job:
    """What to run, and this node's place in it. `master_port` None on a single node: any free port."""

    target: str
    args: tuple[str, ...]
    module: bool
    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int = 0


def launch(job: Job) -> int:
    """Run the job's ranks on this node; the exit status, 0 if all ranks ended well.

    Raises UsageError if the ranks can't be started: the script is missing, the port is taken, the master is not there.
    """
    _check_port(job)
    _quiet_the_agent()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_SECONDS)
    with tempfile.TemporaryDirectory(prefix="zeroshard-", dir=_short_directory()) as directory:
        os.environ[runner.WATCH_VARIABLE] = f"{directory}/watch"
        watch = RankWatch(Path(directory, "watch"), announce=lambda death: _say(report.announcement(death)))
        try:
            with watch:
                launch_agent(_config(job, directory), sys.executable, _command(job))
        except ChildFailedError as error:
            return _conclude(error, watch)
        except SignalException as stop:
            number = signal.Signals(int(stop.sigval))
            _say(f"zeroshard: {number.name} received, all ranks ended")
            return 128 + number
        except (RendezvousError, dist.DistError) as error:
            raise UsageError(f"the nodes did not meet at {_endpoint(job)}: {report.one_line(str(error))}") from error
        finally:
            watch.end_leftovers()
    return 0


def _config(job: Job, directory: str) -> LaunchConfig:
    alone = job.nnodes == 1 and job.master_port is None
    return LaunchConfig(
        min_nodes=job.nnodes,
        max_nodes=job.nnodes,
        nproc_per_node=job.nproc,
        run_id=uuid.uuid4().hex if alone else "zeroshard",
        rdzv_backend="c10d" if alone else "static",
        # Port 0: the agent's store listens on a port that the kernel picks, so two jobs on one node never collide.
        rdzv_endpoint="localhost:0" if alone else _endpoint(job),
        rdzv_configs={} if alone else {"rank": job.node_rank},
        local_addr="localhost" if job.nnodes == 1 else None,
        max_restarts=job.max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=directory),
    )


def _short_directory() -> str:
    """Where the socket goes: its path may have about 100 characters, which the TMPDIR of a cluster can exceed."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 64 else "/tmp"


def _endpoint(job: Job) -> str:
    return f"{job.master_addr or 'localhost'}:{job.master_port or _MULTI_NODE_PORT}"


def _command(job: Job) -> list[str]:
    words = ["module" if job.module else "script", job.target, *job.args]
    # The agent expands $ in arguments as string.Template does; doubled, they reach the script as they were.
    return ["-u", runner.__file__, *(word.replace("$", "$$") for word in words)]


def _check_port(job: Job) -> None:
    """The agent would try for minutes to reach whatever holds the port."""
    if job.node_rank != 0 or (job.nnodes == 1 and job.master_port is None):
        return
    port = job.master_port or _MULTI_NODE_PORT
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UsageError(
                f"--master-port {port}: this node can't listen on it ({error.strerror}); "
                "choose another, or on a single node leave it out"
            ) from error


def _quiet_the_agent() -> None:
    """Our report replaces the agent's log of the same events; LOGLEVEL in the environment brings it back."""
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic."):
                logging.getLogger(name).setLevel(logging.CRITICAL)


def _conclude(error: ChildFailedError, watch: RankWatch) -> int:
    exits = {rank: _exit(rank, failure, watch) for rank, failure in error.failures.items()}
    death: Death | None = watch.first()
    if death is None or death.process.rank not in exits:
        # Died before it could say hello, or after it had said that all is done.
        first, announced = error.get_first_failure()[0], False
    else:
        first, announced = death.process.rank, watch.announced(death)
    cause = exits.pop(first)
    _say(report.conclusion(cause, exits, announced))
    return report.exit_status(cause.code)


def _exit(rank: int, failure: ProcessFailure, watch: RankWatch) -> report.Exit:
    for process in reversed(watch.processes):
        if process.pid == failure.pid:
            return report.Exit(process, failure.exitcode)
    unseen = RankProcess(rank, failure.local_rank, failure.pid, attempt=0, error_file=failure.error_file)
    return report.Exit(unseen, failure.exitcode)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
