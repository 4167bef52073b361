"""Finds the rank of this node that failed first, from files that the ranks write and from the kernel's signals.

    rank 0: started.json ........ error.json .... exit 1           a consequence: it lost rank 1
    rank 1: started.json .. killed (exit -9)                       <- first

torch's agent checks its ranks ten times a second and reports the lowest rank of those that have ended. Here SIGCHLD
reports ends, nearly always before the agent reaps the process; if the agent was first, its status counts, with the time
of the signal. At the first failure, or when the agent is told to stop, the ranks that have ended or are exiting are the
suspects: all others end because the agent ends them. Of the suspects one that was killed by a signal is reported before
those with errors, which may follow from that; among errors the earliest.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing.api import SignalException

from zeroshard.launch.runner import PREEMPTED_FILE, SAVES_FILE, STARTED_FILE

# Signals from the kernel or from outside of the job. The agent sends SIGTERM; SIGABRT often follows from a lost peer.
KILL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# The end of a rank without an error file is noticed so many seconds after its connections to other ranks have closed.
_REPORT_DELAY_SECONDS = 0.05
# A SIGTERM within so many seconds of another one is the same request: some schedulers send it to all processes of a
# job, and the guard passes its own on.
_SAME_REQUEST_SECONDS = 0.5
# A flag of a process in /proc (include/linux/sched.h), set before an exiting process closes its descriptors.
_PF_EXITING = 0x4
_FLAGS_FIELD = 6  # counted from the state, which follows the name


class RankProcess(NamedTuple):
    """What a rank writes into its file when it starts."""

    rank: int
    local_rank: int
    pid: int
    restart: int
    error_file: str


class _ExitStatus(NamedTuple):
    status: int
    seen_at: float


class RankWatch:
    """Watches the ranks of this node; a context manager of the main thread.

    Between `handle_stops` and `__exit__` a stop signal raises torch's SignalException. The exception is SIGTERM if all
    ranks can save: then they are asked to, once, and `saving` is called.

    Args:
        directory: where the ranks write their files.
        count: number of ranks.

    Attributes:
        failed: set when the first rank fails.
        stopped_by: the signal from outside that stopped the agent, or that came when its ranks had ended.
        handles_stops: whether stop signals are handled; before `handle_stops` they end the process.
        leave: called at SIGTERM, before ranks are asked to save; whether the ranks will end by it. It must not wait.
        ended_by_peer: set before the process sends itself SIGTERM because another node is in trouble.
    """

    def __init__(self, directory: Path, count: int, saving: Callable[[], None]) -> None:
        self._directory, self._count, self._saving = directory, count, saving
        self.failed = threading.Event()
        self.stopped_by: signal.Signals | None = None
        self.handles_stops = self.ended_by_peer = False
        self._ends: dict[int, _ExitStatus] = {}
        self._reaped_by_agent: dict[int, float] = {}
        self._suspects: set[int] | None = None
        self._last_sigterm = -math.inf
        self._asked = self._stopping = self._leaving = False
        self.leave: Callable[[], bool] | None = None

    def __enter__(self) -> RankWatch:
        self._former = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, self._on_child_signal)}
        signal.siginterrupt(signal.SIGCHLD, False)  # does not interrupt system calls of torch
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def handle_stops(self) -> None:
        """Handle stop signals from now on; called when ranks are about to start. Before, a signal ends the process."""
        for number in STOP_SIGNALS:
            self._former.setdefault(number, signal.signal(number, self._on_stop_signal))
        self.handles_stops = True

    def only_record_stops(self) -> None:
        """Only record stop signals from now on, since the ranks have ended."""

        def note(number: int, frame: FrameType | None) -> None:
            self.stopped_by = signal.Signals(number)

        for number in self._former.keys() & set(STOP_SIGNALS):
            signal.signal(number, note)

    @property
    def preempted(self) -> bool:
        """Whether a rank has saved and ended because it was told to stop."""
        return any(self._directory.glob(f"*.{PREEMPTED_FILE}"))

    @property
    def asked_to_save(self) -> bool:
        """Whether the ranks were told to save and end; a failure after that is no reason for a restart."""
        return self._asked

    @property
    def all_ended_well(self) -> bool:
        """Whether all ranks have ended and none has failed."""
        return len(self._ends) == self._count and not any(end.status for end in self._ends.values())

    def processes(self) -> list[RankProcess]:
        """The ranks that have started."""
        return [RankProcess(**json.loads(path.read_text())) for path in self._directory.glob(f"*.{STARTED_FILE}")]

    def first_failure(self, statuses: Mapping[int, int]) -> tuple[RankProcess, int] | None:
        """The rank that failed first and its status, negative for a signal; None if none is known to have failed.

        Args:
            statuses: exit statuses that the agent reports, by process id.
        """
        suspects: list[tuple[bool, float, RankProcess, int]] = []
        agent_knew_at = min((at for pid, at in self._reaped_by_agent.items() if statuses.get(pid, 0)), default=math.inf)
        for process in self.processes():
            end = self._ends.get(process.pid)
            status = end.status if end is not None else statuses.get(process.pid, 0)
            suspected = self._suspects is not None and process.pid in self._suspects
            suspected = suspected and (end is None or end.seen_at <= agent_knew_at)  # the agent ends the others then
            recorded_at = _written_at(process.error_file)
            if status == 0 or not (suspected or (recorded_at is not None and not self._stopping)):
                continue
            if status == -signal.SIGTERM and recorded_at is not None:
                status = 1  # it had failed; the agent's signal met it on the way out
            failed_at = recorded_at
            if failed_at is None:
                seen_at = end.seen_at if end is not None else self._reaped_by_agent.get(process.pid, time.time())
                failed_at = seen_at - (_REPORT_DELAY_SECONDS if status > 0 else 0)
            suspects.append((not (suspected and -status in KILL_SIGNALS), failed_at, process, status))
        if not suspects:
            return None
        _, _, process, status = min(suspects)
        return process, status

    def kill_ranks(self) -> None:
        """Kill the remaining processes of the ranks' process groups (each rank leads its own).

        A process id that belongs to a process that is no child of ours has been reused, and is skipped.
        """
        for pid in self._pids():
            if _is_child(pid) or not _exists(pid):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def _pids(self) -> list[int]:
        return [int(path.name.partition(".")[0]) for path in self._directory.glob(f"*.{STARTED_FILE}")]

    def _on_child_signal(self, number: int, frame: FrameType | None) -> None:
        self._read_ends()
        if self._suspects is None and any(end.status for end in self._ends.values()):
            self._record_suspects()
            self.failed.set()
        if self.all_ended_well:
            # torch's agent now waits for other nodes, up to minutes, in C code that a Python handler can't interrupt.
            for number in self._former.keys() & set(STOP_SIGNALS):
                signal.signal(number, signal.SIG_DFL)

    def _read_ends(self) -> None:
        """Read the statuses of ranks that have ended, without reaping them: the agent does that."""
        for pid in self._pids():
            if pid in self._ends:
                continue
            try:
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self._reaped_by_agent.setdefault(pid, time.time())
                continue
            if ended is not None:
                killed = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                self._ends[pid] = _ExitStatus(-ended.si_status if killed else ended.si_status, time.time())

    def _record_suspects(self) -> None:
        if self._suspects is None:
            self._read_ends()
            self._suspects = {
                process.pid
                for process in self.processes()
                if process.pid in self._ends
                or process.pid in self._reaped_by_agent
                or _is_exiting(process.pid)
                or _written_at(process.error_file) is not None
            }

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        by_peer = self.ended_by_peer and not self._stopping
        if not by_peer and number == signal.SIGTERM:
            former, self._last_sigterm = self._last_sigterm, time.monotonic()
            if self._last_sigterm - former < _SAME_REQUEST_SECONDS:
                return
        if not by_peer and not self._stopping and number == signal.SIGTERM and self._end_gently():
            return
        self._record_suspects()
        if self.stopped_by is not None or self._asked or self._leaving:
            self.kill_ranks()  # a second signal: kill now, since the agent would wait for the ranks to end
        if not by_peer:
            self.stopped_by = self.stopped_by or signal.Signals(number)
        if not self._stopping:
            self._stopping = True
            raise SignalException(f"process {os.getpid()} got signal {number}", signal.Signals(number))

    def _end_gently(self) -> bool:
        """Whether the ranks end by themselves, having left the job or saved; at the second signal they don't."""
        if self._leaving or self._asked:
            return False
        if self.leave is not None and self._suspects is None and self.leave():
            self._leaving = True
            return True
        return self.ask_to_save()

    def can_save(self) -> bool:
        """Whether all ranks that run can save; else those that have ended were told to and have."""
        self._read_ends()
        running = self._running()
        return (bool(running) or self.preempted) and all(
            (self._directory / f"{pid}.{SAVES_FILE}").exists() for pid in running
        )

    def _running(self) -> set[int]:
        return set(self._pids()) - set(self._ends)

    def ask_to_save(self) -> bool:
        """Send SIGTERM to all ranks. Returns False, and sends none, if one can't save, was asked or has failed."""
        if self._asked or self._suspects is not None or not self.can_save():
            return False
        running = self._running()
        self._asked = True
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self._saving()
        return True


def _written_at(error_file: str) -> float | None:
    try:
        return os.stat(error_file).st_mtime
    except OSError:
        return None


def _is_exiting(pid: int) -> bool:
    """Whether the process is exiting, though it has no status yet."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return words[0] in "ZX" or bool(int(words[_FLAGS_FIELD]) & _PF_EXITING)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_child(pid: int) -> bool:
    """Whether `pid` is a child of this process, running or not yet reaped; does not reap it."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
