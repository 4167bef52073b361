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
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from zeroshard.cluster import DEFAULT_PORT
from zeroshard.errors import UsageError
from zeroshard.launch import report, runner
from zeroshard.launch.job import Job
from zeroshard.launch.logs import RankLogs, log_directory
from zeroshard.launch.voice import Voice, say
from zeroshard.launch.watch import STOPS, RankProcess, RankWatch

# Ctrl-C and SIGTERM: how long a rank may take to end by itself before SIGKILL. Torch's default is 30.
_SHUTDOWN_SECONDS = "10"
# How long the other nodes may be missing before it is said that they are waited for.
_QUIET_SECONDS = 20.0


@dataclass(frozen=True)
class Ranks:
    """What this node runs of a job: the number of ranks is known by now. `directory` is temporary.

    `restart` counts the starts before this one.
    """

    job: Job
    nproc: int
    directory: Path
    restart: int = 0

    @property
    def host(self) -> str:
        return self.job.node_name or socket.gethostname()


@dataclass(frozen=True)
class Outcome:
    """How the ranks of this node ended.

    Attributes:
        status: the exit status, 0 if all ended well.
        failed: whether a rank failed; else they ended well, or were told to stop.
        first_local_rank: which one failed first, if that is known; violent: whether a signal killed it.
    """

    status: int
    failed: bool = False
    first_local_rank: int | None = None
    violent: bool = False


def launch(ranks: Ranks, voice: Voice) -> Outcome:
    """Run the job's ranks on this node until they have ended.

    SIGTERM asks ranks that can to save and end; the status is then PREEMPTED, and nothing is restarted.

    Raises UsageError if the ranks can't be started: the script is missing, the port is taken, the master is not there.
    """
    job = ranks.job
    check_port(job)
    _quiet_the_agent()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_SECONDS)
    socket_path = ranks.directory / "watch"
    os.environ[runner.WATCH_VARIABLE] = str(socket_path)
    os.environ[runner.RESTART_VARIABLE] = f"{ranks.restart} {job.max_restarts}"
    watch = RankWatch(
        socket_path,
        announce=lambda death: voice.cause(report.announcement(death, ranks.host)),
        died=lambda death: voice.died(death.process.rank, death.violent),
        stopping=voice.stopping,
    )
    with _asks_to_save(watch, voice) as late:
        try:
            with watch, _says_who_is_missing(job, watch):
                voice.ready()
                launch_agent(_config(ranks), sys.executable, _command(job))
        except ChildFailedError as error:
            outcome = _conclude(error, watch, ranks.host, voice)
        except SignalException as stop:
            for number in STOPS:
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C: torch's handler would raise once more
            outcome = Outcome(voice.stopped(signal.Signals(int(stop.sigval)), _failed_before(watch, ranks.host, voice)))
        except (RendezvousError, dist.DistError) as error:
            raise UsageError(f"the nodes did not meet at {_endpoint(job)}: {report.one_line(str(error))}") from error
        else:
            outcome = Outcome(voice.preempted() if watch.preempted else voice.ended(0, []))
        finally:
            watch.end_leftovers()
    return replace(outcome, failed=False) if late else outcome


def _failed_before(watch: RankWatch, host: str, voice: Voice) -> int | None:
    """The exit status of the rank that had failed before a signal came; None if none had. It is told if it was not."""
    death = watch.conclude({})
    if death is None:
        return None
    if not watch.announced:
        voice.cause(report.announcement(death, host))
    return report.exit_status(-death.signal) if death.signal else 1


@contextmanager
def _asks_to_save(watch: RankWatch, voice: Voice) -> Iterator[list[int]]:
    """SIGTERM is a request to the ranks that can save, once; else, and from then on, what torch's agent makes of it.

    When the agent is through, what happened is still to be told: a signal that comes then is put into the list.
    """
    handling: list[int] = []
    late: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if watch.through:
            late.append(number)
            return
        if handling:
            return  # of a guard that is killed the kernel tells us once for each of its threads
        handling.append(number)
        try:
            if voice.may_save() and watch.ask_to_save():
                voice.saving(signal.SIGTERM)
                return
            watch.stop_ranks()
        finally:
            handling.clear()
        raise SignalException(f"process {os.getpid()} got SIGTERM", signal.SIGTERM)

    former = signal.signal(signal.SIGTERM, handle)
    try:
        yield late
    finally:
        signal.signal(signal.SIGTERM, former)


def _config(ranks: Ranks) -> LaunchConfig:
    job = ranks.job
    alone = _is_alone(job)
    return LaunchConfig(
        min_nodes=job.nnodes,
        max_nodes=job.nnodes,
        nproc_per_node=ranks.nproc,
        run_id=uuid.uuid4().hex if alone else "zeroshard",
        rdzv_backend="c10d" if alone else "static",
        # Port 0: the agent's store listens on a port that the kernel picks, so two jobs on one node never collide.
        rdzv_endpoint="localhost:0" if alone else _endpoint(job),
        rdzv_configs={} if alone else {"rank": job.node_rank, "timeout": job.rendezvous_timeout},
        local_addr="localhost" if job.nnodes == 1 else None,
        max_restarts=0,  # restarts.py makes them
        signals_to_handle=",".join(number.name for number in STOPS),
        log_line_prefix_template="rank ${rank}: ",  # of what is shown besides going to a file
        logs_specs=RankLogs(str(ranks.directory), log_directory(job.log_dir), job.console, ranks.restart),
    )


def _is_alone(job: Job) -> bool:
    return job.nnodes == 1 and job.master_port is None


def _endpoint(job: Job) -> str:
    return f"{job.master_addr or 'localhost'}:{job.master_port or DEFAULT_PORT}"


def _command(job: Job) -> list[str]:
    words = [job.kind.value, job.target, *job.args]
    # The agent expands $ in arguments as string.Template does; doubled, they reach the script as they were.
    return ["-u", runner.__file__, *(word.replace("$", "$$") for word in words)]


def check_port(job: Job) -> None:
    """The agent would try for minutes to reach whatever holds the port."""
    if job.node_rank != 0 or _is_alone(job):
        return
    port = job.master_port or DEFAULT_PORT
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UsageError(
                f"--master-port {port}: this node can't listen on it ({error.strerror}); "
                "choose another, or on a single node leave it out"
            ) from error


@contextmanager
def _says_who_is_missing(job: Job, watch: RankWatch) -> Iterator[None]:
    """Until the first rank has been started, now and then say that the other nodes are waited for."""
    begun = threading.Event()

    def remind() -> None:
        waited = 0.0
        while not begun.wait(_QUIET_SECONDS) and not watch.processes:
            waited += _QUIET_SECONDS
            say(
                f"zeroshard: waiting for the other nodes at {_endpoint(job)} for {waited:.0f} s; "
                f"an error after {job.rendezvous_timeout} s (--rendezvous-timeout)"
            )

    if job.nnodes > 1:
        threading.Thread(target=remind, name="missing-nodes", daemon=True).start()
    try:
        yield
    finally:
        begun.set()


def _quiet_the_agent() -> None:
    """Our report replaces the agent's log of the same events; LOGLEVEL in the environment brings it back."""
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic."):
                logging.getLogger(name).setLevel(logging.CRITICAL)


def _conclude(error: ChildFailedError, watch: RankWatch, host: str, voice: Voice) -> Outcome:
    exits = {rank: _exit(rank, failure, watch) for rank, failure in error.failures.items()}
    death = watch.conclude({failure.pid: failure.exitcode for failure in error.failures.values()})
    if death is None or death.process.rank not in exits:
        # Died before it could say hello, or after it had said that all is done.
        first, told = error.get_first_failure()[0], False
        voice.died(first, violent=False)
    else:
        # A death that was announced without its cause is told again with it.
        first, told = death.process.rank, watch.announced and (death.recorded or death.signal is not None)
    cause = exits.pop(first)
    if not told:
        voice.cause(report.cause(cause, host))
    status = voice.ended(report.exit_status(cause.code), report.consequences(exits))
    return Outcome(status, True, cause.process.local_rank, violent=cause.code < 0)


def _exit(rank: int, failure: ProcessFailure, watch: RankWatch) -> report.Exit:
    for process in reversed(watch.processes):
        if process.pid == failure.pid:
            return report.Exit(process, failure.exitcode)
    unseen = RankProcess(rank, failure.local_rank, failure.pid, attempt=0, error_file=failure.error_file)
    return report.Exit(unseen, failure.exitcode)
