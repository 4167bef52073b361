"""Start the ranks of this node and stay until they have ended, through torchrun's elastic agent.

    launch() -> torch.distributed.launcher.api.launch_agent -> one runner.py per rank -> the user's script

The agent does the rendezvous, sets the ranks' environment, and handles their logs and their end. Added here: which rank
failed first (failures.py, and among nodes peers.py), and the report. Calling the `torchrun` command was rejected: it
prints its summary last, and it sets a thread count of 1 that can't be distinguished from a user's choice.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from zeroshard.cluster import DEFAULT_PORT
from zeroshard.errors import UsageError
from zeroshard.launch import report, runner
from zeroshard.launch.binding import numa_options
from zeroshard.launch.failures import KILL_SIGNALS, RankProcess, RankWatch
from zeroshard.launch.job import ORDERED_FILE, Job
from zeroshard.launch.logs import RankLogs
from zeroshard.launch.messages import SAVED, SAVING, say, send
from zeroshard.launch.peers import Ending, EndKind, Peers

# Seconds that a rank may take to end by itself after Ctrl-C or SIGTERM, before SIGKILL. torch's default is 30.
_SHUTDOWN_SECONDS = "10"
# While other nodes are missing, a message says so every so many seconds.
_REMINDER_SECONDS = 20.0


@dataclass(frozen=True)
class Ranks:
    """One start of this node's ranks.

    Attributes:
        nproc: the number of ranks.
        directory: the node's temporary directory; `files` is the part of it for this start.
        restart: the number of starts before this one.
    """

    job: Job
    nproc: int
    directory: Path
    restart: int = 0

    @property
    def host(self) -> str:
        return self.job.node_name or socket.gethostname()

    @property
    def files(self) -> Path:
        return self.directory / str(self.restart)


@dataclass(frozen=True)
class Outcome:
    """How the ranks of this node ended.

    Attributes:
        status: the exit status, 0 if all ended well.
        failed: whether a rank failed; else all ended well, or were told to stop.
        first_local_rank: the local rank that failed first; None if that is not known.
        killed: whether a signal ended that rank.
    """

    status: int
    failed: bool = False
    first_local_rank: int | None = None
    killed: bool = False


def launch(ranks: Ranks, control: Callable[[RankWatch | None], None] | None = None) -> Outcome:
    """Run the job's ranks on this node until they have ended.

    SIGTERM asks ranks that support it to save and end; the status is then PREEMPTED, and nothing is restarted.

    Args:
        control: called with the ranks' watch before they start, by which another thread may end them, and with None
            after they have ended.

    Raises:
        UsageError: the ranks can't be started: the port is taken, or node 0 can't be reached.
    """
    job = ranks.job
    check_port(job)
    _quiet_the_agent()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_SECONDS)
    ranks.files.mkdir()
    os.environ[runner.FILES_VARIABLE] = str(ranks.files)
    os.environ[runner.RESTART_VARIABLE] = f"{ranks.restart} {job.max_restarts}"
    watch = RankWatch(ranks.files, ranks.nproc, lambda: send(kind="saving") if job.over_ssh else say(SAVING))
    first: tuple[int, int] | None = None
    with watch:
        peers = Peers(job, watch) if job.nnodes > 1 else None
        try:
            if control is not None:
                control(watch)
            with _reporting_missing_nodes(job, watch):
                launch_agent(_config(ranks, watch), sys.executable, _command(job))
        except ChildFailedError as error:
            ending, first = (
                (Ending(EndKind.ENDED, 1), None) if watch.ended_by_peer else _failure(error, watch, ranks.host)
            )
        except SignalException:
            by_us = control is not None and watch.ended_by_peer
            ending = Ending(EndKind.ENDED, 1) if by_us else _stopped(ranks, watch)
        except (RendezvousError, dist.DistError) as error:
            raise UsageError(f"the nodes did not meet at {_endpoint(job)}: {report.one_line(str(error))}") from error
        else:
            ending = Ending(EndKind.ENDED, runner.PREEMPTED if watch.preempted else 0)
        finally:
            watch.only_record_stops()
            if control is not None:
                control(None)
            watch.kill_ranks()
        status = peers.conclude(ending) if peers is not None else _print_ending(ending)
        if status == runner.PREEMPTED and not job.over_ssh:
            say(SAVED)
        failed = first is not None and watch.stopped_by is None and not watch.asked_to_save
    if first is None:
        return Outcome(status)
    return Outcome(status, failed, first[0], killed=first[1] < 0)


def _print_ending(ending: Ending) -> int:
    for lines in (ending.text, *ending.others):
        if lines:
            say(lines)
    return ending.status


def _failure(error: ChildFailedError, watch: RankWatch, host: str) -> tuple[Ending, tuple[int, int]]:
    """The ending of a node of which a rank failed, and that rank's local rank and status."""
    failures = dict(error.failures)
    known = watch.first_failure({failure.pid: failure.exitcode for failure in failures.values()})
    if known is not None and known[0].rank in failures:
        process, status = known
    else:  # it ended before it had written that it had started
        by_itself = {rank: failure for rank, failure in failures.items() if -failure.exitcode != signal.SIGTERM}
        rank, failure = ChildFailedError("", by_itself or failures).get_first_failure()
        process = RankProcess(rank, failure.local_rank, failure.pid, 0, failure.error_file)
        status = failure.exitcode
    del failures[process.rank]
    how = EndKind.KILLED if -status in KILL_SIGNALS else EndKind.FAILED
    text = report.first_failure(process, status, host)
    ending = Ending(how, report.exit_status(status), text, tuple(report.consequences(failures)))
    return ending, (process.local_rank, status)


def _stopped(ranks: Ranks, watch: RankWatch) -> Ending:
    """The ending of a node that was told to stop; it includes a rank that had failed before."""
    job, number = ranks.job, watch.stopped_by
    known = watch.first_failure({})
    text = report.first_failure(*known, ranks.host) if known is not None else ""
    if known is not None and (number is None or job.nnodes > 1):
        status = known[1]
        return Ending(EndKind.KILLED if -status in KILL_SIGNALS else EndKind.FAILED, report.exit_status(status), text)
    if number is None:
        return Ending(EndKind.ENDED, 1)
    if job.over_ssh and (ranks.directory / ORDERED_FILE).exists():
        return Ending(EndKind.ENDED, 128 + number)
    if job.nnodes == 1:
        return Ending(EndKind.STOPPED, 128 + number, text, (f"zeroshard: {number.name} received, all ranks ended",))
    # With a launcher the other nodes report this one.
    said = () if job.over_ssh else (f"zeroshard: {number.name} received, all ranks of this node ended",)
    lost = f"zeroshard: node {job.node_rank} (host {ranks.host}) was lost first: its agent got {number.name}"
    return Ending(EndKind.STOPPED, 128 + number, lost, said)


def _config(ranks: Ranks, watch: RankWatch) -> LaunchConfig:
    job = ranks.job
    alone = _may_use_any_port(job)
    logs = None if job.log_dir is None else Path(job.log_dir).expanduser()
    return LaunchConfig(
        min_nodes=job.nnodes,
        max_nodes=job.nnodes,
        nproc_per_node=ranks.nproc,
        run_id=uuid.uuid4().hex if alone else "zeroshard",
        rdzv_backend="c10d" if alone else "static",
        # Port 0: the kernel chooses the port of the agent's store, so two jobs on one node don't collide.
        rdzv_endpoint="localhost:0" if alone else _endpoint(job),
        rdzv_configs={} if alone else {"rank": job.node_rank, "timeout": job.rendezvous_timeout},
        local_addr="localhost" if job.nnodes == 1 else None,
        max_restarts=0,  # restarts.py does restarts
        signals_to_handle="",  # the watch handles them
        log_line_prefix_template="rank ${rank}: ",  # of lines that are shown and also written to a file
        logs_specs=RankLogs(str(ranks.files), logs, job.console, ranks.restart, watch.handle_stops),
        numa_options=numa_options(job),
    )


def _may_use_any_port(job: Job) -> bool:
    return job.nnodes == 1 and job.master_port is None


def _endpoint(job: Job) -> str:
    return f"{job.master_addr or 'localhost'}:{job.master_port or DEFAULT_PORT}"


def _command(job: Job) -> list[str]:
    words = [job.kind.value, job.target, *job.args]
    # The agent expands $ in arguments as string.Template does; doubled, the script gets them unchanged.
    return ["-u", runner.__file__, *(word.replace("$", "$$") for word in words)]


def check_port(job: Job) -> None:
    """Raises UsageError, before anything is started, if this is node 0 and it can't listen on its port."""
    if job.node_rank != 0 or _may_use_any_port(job):
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
def _reporting_missing_nodes(job: Job, watch: RankWatch) -> Iterator[None]:
    """Until the first rank has started, print from time to time that this node waits for the other nodes."""
    begun = threading.Event()

    def remind() -> None:
        waited = 0.0
        while not begun.wait(_REMINDER_SECONDS) and not watch.processes():
            waited += _REMINDER_SECONDS
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
    """Switch off the agent's log, which our report replaces, unless LOGLEVEL is set in the environment."""
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic."):
                logging.getLogger(name).setLevel(logging.CRITICAL)
