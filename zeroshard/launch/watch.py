"""Who failed first: the launcher's end of the sockets that the ranks hold open.

    rank 0: hello ................ end of file   (torn down by the launcher)
    rank 1: hello ..... "failed"                 <- first
    rank 2: hello ........ end of file           (killed by the kernel)

The elastic agent polls ten times a second and stamps failures in whole seconds, so that when one rank is killed and its
peers report lost connections, it may name a peer. Here the order is that in which the sockets speak. A rank that says
"failed" is reported while the agent is still ending the others; for one that just vanishes the cause (signal or exit
code) comes from the agent. One exception to the order: the kernel closes a killed rank's last socket first, so that its
peers can fail before our end of file comes. A rank killed outright within a tenth of a second goes before them.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

# A rank that vanished is announced without its cause if the agent has not given one by then (it restarts, or waits for
# a rank that does not want to end).
_CAUSE_SECONDS = 1.0
# A rank that says "failed" is announced after this time, in which one that was killed can still go before it.
_SETTLE_SECONDS = 0.1
# After its last descriptor is closed a process has this long to become one whose status can be read.
_STATUS_SECONDS = 0.5
# Sent by the kernel or from outside of the job. SIGTERM is the agent's, SIGABRT often a consequence (a lost peer).
KILLERS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


# SIGTERM may be a request to save, which the agent decides.
_STOPS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class RankProcess(NamedTuple):
    """What a rank says of itself when it starts."""

    rank: int
    local_rank: int
    pid: int
    attempt: int
    error_file: str


@dataclass(frozen=True)
class Death:
    """A rank that failed: with a traceback in its error file, or by vanishing, with the signal if that is known."""

    process: RankProcess
    recorded: bool
    signal: signal.Signals | None = None

    @property
    def violent(self) -> bool:
        """Whether it was killed outright."""
        return self.signal in KILLERS


@dataclass
class _Peer:
    connection: socket.socket
    received: bytes = b""
    process: RankProcess | None = None
    ended: bool = False


@dataclass
class _Attempt:
    first: Death
    announce_at: float
    announced: bool = False


@dataclass
class RankWatch:
    """Listens at `path` from `__enter__` to `__exit__`; calls `announce` once per attempt, from its own thread, and
    `died` before it, at the first sign of the same death (twice if a violent one then goes before another). `stopping`
    is called when a signal tells this process to stop; what ends from then on has not failed.

    Ranks that say "saves" take SIGTERM as a request: `ask_to_save` sends it.
    After `__exit__`, `processes` holds every rank that said hello, `first()` the first death of the last attempt.
    """

    path: Path
    announce: Callable[[Death], None]
    died: Callable[[Death], None] = lambda death: None
    stopping: Callable[[signal.Signals], None] = lambda number: None
    processes: list[RankProcess] = field(default_factory=list)
    _attempts: dict[int, _Attempt] = field(default_factory=dict)
    _told_to_stop: bool = False
    _saving: set[int] = field(default_factory=set)
    _ended: set[int] = field(default_factory=set)
    _preempted: set[int] = field(default_factory=set)
    _asked: bool = False

    def __enter__(self) -> RankWatch:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(1024)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        # Ranks that end because the agent was told to stop have not failed: the signal is heard before they end.
        self._signalled, self._signals = socket.socketpair()
        self._signals.setblocking(False)
        self._selector.register(self._signalled, selectors.EVENT_READ)
        self._outer_wakeup = signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._serve, name="rank-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._outer_wakeup)
        self._wake.close()  # the thread reads what is pending, then ends
        self._thread.join()
        self._signals.close()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def ask_to_save(self) -> bool:
        """Ask all ranks to save and end; False, and nothing done, if one of them would not, or was asked before."""
        running = self._running()
        if not running:
            return self.preempted  # they heard of it themselves, and are through
        if self._asked or not running <= self._saving:
            return False
        self._asked = True
        _signal(running, signal.SIGTERM)
        return True

    def stop(self, number: signal.Signals) -> None:
        """The agent is going to end its ranks: what ends from now on has not failed. Those that save end at once."""
        if not self._told_to_stop:
            self._told_to_stop = True
            self.stopping(number)
        if self._asked:
            _signal(self._running(), signal.SIGKILL)

    def _running(self) -> set[int]:
        attempt = self._last_attempt()
        return {process.pid for process in self.processes if process.attempt == attempt} - self._ended

    def first(self) -> Death | None:
        """The first death of the last attempt."""
        attempt = self._attempts.get(self._last_attempt())
        return attempt.first if attempt else None

    @property
    def preempted(self) -> bool:
        """Whether a rank of the last attempt was told to stop and has saved."""
        return self._last_attempt() in self._preempted

    def _last_attempt(self) -> int:
        return max((process.attempt for process in self.processes), default=0)

    def announced(self, death: Death) -> bool:
        """Whether the death has been told."""
        return self._attempts[death.process.attempt].announced

    def end_leftovers(self) -> None:
        """Kill what is left of the ranks' process groups (each rank leads its own) once the agent is through.

        A number that is now another process's, neither a child of ours nor free, has been reused: it is left alone.
        """
        for process in self.processes:
            if _is_child(process.pid) or not _exists(process.pid):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _serve(self) -> None:
        stopping = False
        while True:
            pending = any(not attempt.announced for attempt in self._attempts.values())
            ready = self._selector.select(timeout=0 if stopping else _SETTLE_SECONDS / 2 if pending else 1.0)
            if stopping and not ready:
                return
            for key, _ in ready:
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))
                elif key.fileobj is self._woken:
                    self._selector.unregister(self._woken)
                    self._woken.close()
                    stopping = True
                elif key.fileobj is self._signalled:
                    self._hear_signals()
                else:
                    self._read(key.data)
            if not stopping:
                self._announce_where(lambda number, attempt: time.monotonic() >= attempt.announce_at)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            if peer.process is not None and not peer.ended:
                self._ended.add(peer.process.pid)
                self._died(Death(peer.process, recorded=False, signal=_end_signal(peer.process.pid)))
            return
        *lines, peer.received = (peer.received + data).split(b"\n")
        for line in lines:
            self._hear(peer, line)

    def _hear(self, peer: _Peer, line: bytes) -> None:
        if peer.process is None:
            process = peer.process = RankProcess(**json.loads(line))
            self.processes.append(peer.process)
            self._announce_where(lambda number, attempt: number < process.attempt)
            return
        if line == b"saves":
            self._saving.add(peer.process.pid)
            return
        peer.ended = True
        self._ended.add(peer.process.pid)
        if line == b"failed":
            self._died(Death(peer.process, recorded=True))
        elif line == b"preempted":
            self._preempted.add(peer.process.attempt)

    def _hear_signals(self) -> None:
        for number in self._signalled.recv(64):
            if number in _STOPS:
                self.stop(signal.Signals(number))

    def _died(self, death: Death) -> None:
        number = death.process.attempt
        if self._told_to_stop:
            return
        known = self._attempts.get(number)
        if known is not None and (known.announced or known.first.violent or not death.violent):
            return
        seconds = _CAUSE_SECONDS if death.signal is None and not death.recorded else _SETTLE_SECONDS
        self._attempts[number] = _Attempt(death, time.monotonic() + seconds)
        self.died(death)
        if self._asked:
            os.kill(os.getpid(), signal.SIGTERM)  # a rank could not save: that is the end, and nothing to be restarted

    def _announce_where(self, due: Callable[[int, _Attempt], bool]) -> None:
        for number, attempt in self._attempts.items():
            # A script may close descriptors that it does not know, and a large process takes seconds to go: only what
            # has ended is called dead.
            ended = attempt.first.recorded or not _is_running_child(attempt.first.process.pid)
            if not attempt.announced and due(number, attempt) and ended:
                self._announce(attempt)

    def _announce(self, attempt: _Attempt) -> None:
        attempt.announced = True
        self.announce(attempt.first)


def _end_signal(pid: int) -> signal.Signals | None:
    """The signal that ended a child; None if it exited, or does not end in time."""
    deadline = time.monotonic() + _STATUS_SECONDS
    while time.monotonic() < deadline:
        try:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if status is not None:
            killed = status.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            return signal.Signals(status.si_status) if killed else None
        time.sleep(0.002)
    return None


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


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


def _is_running_child(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
