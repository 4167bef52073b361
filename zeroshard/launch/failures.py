"""Which rank of this node failed first, and what the ranks have said of themselves: files, and the kernel's word.

    rank 0: started.json ........ error.json .... exit 1           a consequence: it lost rank 1
    rank 1: started.json .. killed (exit -9)                       <- first

torch's agent looks at its ranks ten times a second and blames the lowest of those that have ended by then. So ends are
heard of by SIGCHLD, nearly always before the agent takes the statuses; of a rank of which it has, the agent's status
counts, at the time of the news. At the first failure, or when the agent is told to stop, the
ranks that have ended or are about to are the suspects: all others end because the agent ends them. Of the suspects one
that was killed outright goes before errors, which may follow from its death; among errors the time decides.
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

# Sent by the kernel or from outside of the job. SIGTERM is the agent's, SIGABRT often a consequence (a lost peer).
KILLERS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# A rank that leaves without an error file is heard of so much later than its peers, whose connections close before.
_NEWS_SECONDS = 0.05
# Of the flags of a process in /proc (include/linux/sched.h): set before a process that ends closes its descriptors.
_PF_EXITING = 0x4
_FLAGS_FIELD = 6  # counted from the state, which follows the name


class RankProcess(NamedTuple):
    """What a rank says of itself when it starts."""

    rank: int
    local_rank: int
    pid: int
    restart: int
    error_file: str


class _End(NamedTuple):
    status: int
    seen_at: float


class RankWatch:
    """Watches the `count` ranks that write their files into `directory`; a context manager of the main thread.

    Between `handle_stops` and `__exit__` a signal that stops raises torch's SignalException; not SIGTERM if all ranks
    can save at it: then they are asked to, once, and `saving` is called.

    Attributes:
        failed: set when the first rank fails.
        stopped_by: the signal from outside that has stopped the agent, or has come when its ranks had ended.
        hears_stops: whether a signal that stops is handled; before ranks are about to start it ends the process.
        ended_by_peer: set before the process sends itself SIGTERM, because another node is in trouble.
    """

    def __init__(self, directory: Path, count: int, saving: Callable[[], None]) -> None:
        self._directory, self._count, self._saving = directory, count, saving
        self.failed = threading.Event()
        self.stopped_by: signal.Signals | None = None
        self.hears_stops = self.ended_by_peer = False
        self._ends: dict[int, _End] = {}
        self._taken: dict[int, float] = {}
        self._suspects: set[int] | None = None
        self._asked = self._stopping = False

    def __enter__(self) -> RankWatch:
        self._former = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, self._hear_ends)}
        signal.siginterrupt(signal.SIGCHLD, False)  # system calls of torch go on
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def handle_stops(self) -> None:
        """Called when ranks are about to start; before, a signal may end the process, which could not hear it."""
        for number in STOPS:
            self._former.setdefault(number, signal.signal(number, self._stop))
        self.hears_stops = True

    def note_stops(self) -> None:
        """The ranks have ended: a signal that comes from now on is noted alone."""

        def note(number: int, frame: FrameType | None) -> None:
            self.stopped_by = signal.Signals(number)

        for number in self._former.keys() & set(STOPS):
            signal.signal(number, note)

    @property
    def preempted(self) -> bool:
        """Whether a rank has ended because it was told to stop, and has saved."""
        return any(self._directory.glob(f"*.{PREEMPTED_FILE}"))

    @property
    def asked_to_save(self) -> bool:
        """Whether the ranks were told to save and end; what fails then is not to be started again."""
        return self._asked

    @property
    def all_ended_well(self) -> bool:
        """Whether no rank is left and none has failed."""
        return len(self._ends) == self._count and not any(end.status for end in self._ends.values())

    def processes(self) -> list[RankProcess]:
        """The ranks that have started."""
        return [RankProcess(**json.loads(path.read_text())) for path in self._directory.glob(f"*.{STARTED_FILE}")]

    def first_failure(self, statuses: Mapping[int, int]) -> tuple[RankProcess, int] | None:
        """The rank that failed first and its status, negative for a signal; `statuses`, by pid, are the agent's."""
        suspects: list[tuple[bool, float, RankProcess, int]] = []
        agent_knew_at = min((at for pid, at in self._taken.items() if statuses.get(pid, 0)), default=math.inf)
        for process in self.processes():
            end = self._ends.get(process.pid)
            status = end.status if end is not None else statuses.get(process.pid, 0)
            suspected = self._suspects is not None and process.pid in self._suspects
            suspected = suspected and (end is None or end.seen_at <= agent_knew_at)  # the agent ends the others then
            recorded_at = _written_at(process.error_file)
            if status == 0 or not (suspected or (recorded_at is not None and not self._stopping)):
                continue
            failed_at = recorded_at
            if failed_at is None:
                seen_at = end.seen_at if end is not None else self._taken.get(process.pid, time.time())
                failed_at = seen_at - (_NEWS_SECONDS if status > 0 else 0)
            suspects.append((not (suspected and -status in KILLERS), failed_at, process, status))
        if not suspects:
            return None
        _, _, process, status = min(suspects)
        return process, status

    def kill_ranks(self) -> None:
        """Kill what is left of the ranks' process groups (each rank leads its own).

        A number that is now another process's, neither a child of ours nor free, has been reused: it is left alone.
        """
        for pid in self._pids():
            if _is_child(pid) or not _exists(pid):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def _pids(self) -> list[int]:
        return [int(path.name.partition(".")[0]) for path in self._directory.glob(f"*.{STARTED_FILE}")]

    def _hear_ends(self, number: int, frame: FrameType | None) -> None:
        self._read_ends()
        if self._suspects is None and any(end.status for end in self._ends.values()):
            self._suspect()
            self.failed.set()
        if self.all_ended_well:
            # torch's agent waits for the other nodes now, for minutes, in C code that no Python handler interrupts.
            for number in self._former.keys() & set(STOPS):
                signal.signal(number, signal.SIG_DFL)

    def _read_ends(self) -> None:
        """Statuses of ranks that have ended, left for the agent to take."""
        for pid in self._pids():
            if pid in self._ends:
                continue
            try:
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self._taken.setdefault(pid, time.time())
                continue
            if ended is not None:
                killed = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                self._ends[pid] = _End(-ended.si_status if killed else ended.si_status, time.time())

    def _suspect(self) -> None:
        if self._suspects is None:
            self._read_ends()
            self._suspects = {
                process.pid
                for process in self.processes()
                if process.pid in self._ends
                or process.pid in self._taken
                or _is_exiting(process.pid)
                or _written_at(process.error_file) is not None
            }

    def _stop(self, number: int, frame: FrameType | None) -> None:
        by_peer = self.ended_by_peer and not self._stopping
        if not by_peer and not self._stopping and number == signal.SIGTERM and self._ask_to_save():
            return
        self._suspect()
        if self.stopped_by is not None or self._asked:
            self.kill_ranks()  # told twice; the agent would wait for them to end by themselves
        if not by_peer:
            self.stopped_by = self.stopped_by or signal.Signals(number)
        if not self._stopping:
            self._stopping = True
            raise SignalException(f"process {os.getpid()} got signal {number}", signal.Signals(number))

    def _ask_to_save(self) -> bool:
        """SIGTERM to all ranks; False, and nothing done, if one would not save, was asked before or has failed."""
        self._read_ends()
        running = set(self._pids()) - set(self._ends)
        can_save = {pid for pid in running if (self._directory / f"{pid}.{SAVES_FILE}").exists()}
        if self._asked or self._suspects is not None or not running <= can_save or (not running and not self.preempted):
            return False
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
    """Whether the process is on its way out, though it has no status yet."""
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
    """Whether `pid` is a child of this process, running or not yet waited for; its status stays for the agent."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
