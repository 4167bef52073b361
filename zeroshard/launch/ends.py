"""How the ranks' processes end: the status of each, read before the agent takes it, and who is on the way out.

    rank: running .... exiting (its sockets close) ........ zombie ........ reaped by the agent
                       is_exiting: True                     status          status, from memory
                                                            ^ SIGCHLD comes here, to the thread that reaps

The agent keeps the status that it takes to itself until all its ranks have ended, and loses it when a signal stops it.
So a handler of SIGCHLD reads it without taking it (WNOWAIT): it runs in the main thread, before the agent's next step.
What is left of the race, a child that ends in the instant in which the agent asks for it, gives LOST and never a wrong
answer. Waiting for the socket of a rank alone was rejected: a killed rank's connections to its peers may close first.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import FrameType, TracebackType

# Of the flags of a process in /proc (include/linux/sched.h): set before a process that ends closes its descriptors.
_PF_EXITING = 0x4
_FLAGS_FIELD = 6  # counted from the state, which follows the name


class Unknown(Enum):
    """Why there is no status."""

    RUNNING = "running or still ending"
    LOST = "taken by the agent"


class Ends:
    """Statuses of child processes, from `__enter__` to `__exit__` also of those that are reaped; in the main thread.

    A status is an exit code, negative for a signal, as that of `subprocess`.
    """

    def __init__(self, children: Callable[[], Iterable[int]]) -> None:
        self._children = children
        self._statuses: dict[int, int] = {}

    def __enter__(self) -> Ends:
        self._former = signal.signal(signal.SIGCHLD, self._read_all)
        signal.siginterrupt(signal.SIGCHLD, False)  # system calls of torch go on
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGCHLD, self._former)

    def learn(self, pid: int, status: int) -> None:
        """What the agent says at last."""
        self._statuses.setdefault(pid, status)

    def status(self, pid: int) -> int | Unknown:
        """How the child ended, if that can be known."""
        if pid not in self._statuses:
            try:
                self._read(os.P_PID, pid)
            except ChildProcessError:
                # Looked up after the failure: the handler has read it before the agent could take it.
                return self._statuses.get(pid, Unknown.LOST)
        return self._statuses.get(pid, Unknown.RUNNING)

    def is_ending(self, pid: int) -> bool:
        """Whether the child has ended or is about to: whatever follows from its end comes after this is so."""
        return self.status(pid) is not Unknown.RUNNING or _is_exiting(pid)

    def _read_all(self, number: int, frame: FrameType | None) -> None:
        with suppress(ChildProcessError):
            self._read(os.P_ALL, 0)  # one that ends before it could say who it is
        for pid in tuple(self._children()):
            with suppress(ChildProcessError):
                self._read(os.P_PID, pid)

    def _read(self, kind: int, pid: int) -> None:
        ended = os.waitid(kind, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            killed = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            self._statuses[ended.si_pid] = -ended.si_status if killed else ended.si_status


def _is_exiting(pid: int) -> bool:
    """Linux only; elsewhere a process ends when its status is there."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return words[0] in "ZX" or bool(int(words[_FLAGS_FIELD]) & _PF_EXITING)
