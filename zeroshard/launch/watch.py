"""Who failed first: the launcher's end of the sockets that the ranks hold open.

    rank 0: hello ................ end of file   (torn down by the launcher)
    rank 1: hello ..... "failed"                 <- first
    rank 2: hello ........ end of file           (killed by the kernel)

The elastic agent polls ten times a second and stamps failures in whole seconds, so that when one rank is killed and its
peers report lost connections, it may name a peer. Here the order is that in which the sockets speak. A rank that says
"failed" is reported while the agent is still ending the others; for one that just vanishes the status is read from the
kernel (ends.py). One exception to the order: the kernel may close a killed rank's connections to its peers before ours,
so that they can fail first. So whenever one fails, and before the agent is told to stop, the others are looked at: one
that is on the way out by then is waited for, and goes first if it was killed outright. A time in which it has to come
was rejected: on a busy machine it comes later.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from zeroshard.launch.ends import Ends, Unknown

# A rank that vanished, and nothing else has failed, is announced without its cause if that is not known by then.
_CAUSE_SECONDS = 1.0
# A rank that says "failed" is announced after this time, in which one that was killed can still go before it.
_SETTLE_SECONDS = 0.1
# How long the main thread waits until the watch has read what was said to it; it only reads what is there.
_CATCH_UP_SECONDS = 10.0
# Sent by the kernel or from outside of the job. SIGTERM is the agent's, SIGABRT often a consequence (a lost peer).
KILLERS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
# SIGTERM may be a request to save, which the agent decides.
STOPS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


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
class _Trouble:
    """What has gone wrong: deaths in the order in which they were heard.

    `unexplained` are ranks, by process, that have ended or are about to, and whose status is not known yet.
    """

    began_at: float | None = None
    deaths: list[Death] = field(default_factory=list)
    unexplained: dict[int, RankProcess] = field(default_factory=dict)
    announced: bool = False

    @property
    def first(self) -> Death | None:
        """The one to blame, by what is known."""
        return next((death for death in self.deaths if death.violent), self.deaths[0] if self.deaths else None)

    def is_due(self) -> bool:
        """Whether nothing can go before the first death any more, so that it can be told."""
        if self.announced or not self.deaths:
            return False
        if self.unexplained:
            return self._alone and self.waited() >= _CAUSE_SECONDS
        return self.waited() >= _SETTLE_SECONDS

    def waited(self) -> float:
        """Seconds since the first death."""
        return 0.0 if self.began_at is None else time.monotonic() - self.began_at

    @property
    def _alone(self) -> bool:
        return set(self.unexplained) == {death.process.pid for death in self.deaths}

    def knows(self, pid: int) -> bool:
        """Whether the death of that process was heard."""
        return any(death.process.pid == pid for death in self.deaths)

    def drop(self, pid: int) -> None:
        """What was taken for the death of that process was none."""
        self.deaths = [death for death in self.deaths if death.process.pid != pid]
        self.began_at = self.began_at if self.deaths else None

    def add(self, death: Death) -> None:
        """A death, or what is now known of one."""
        for place, known in enumerate(self.deaths):
            if known.process.pid == death.process.pid:
                self.deaths[place] = death
                return
        self.deaths.append(death)
        self.began_at = self.began_at or time.monotonic()


@dataclass
class RankWatch:
    """Listens at `path` from `__enter__` to `__exit__`; calls `announce` at most once, from its own thread, and
    `died` before it, at the first sign of the same death (twice if a violent one then goes before another). `stopping`
    is called when a signal tells this process to stop; what ends from then on has not failed. Its second argument says
    whether nothing had failed before.

    Ranks that say "saves" take SIGTERM as a request: `ask_to_save` sends it.
    After `__exit__`, `processes` holds every rank that said hello; `conclude` gives the first death.
    """

    path: Path
    announce: Callable[[Death], None]
    died: Callable[[Death], None] = lambda death: None
    stopping: Callable[[signal.Signals, bool], None] = lambda number, clear: None
    processes: list[RankProcess] = field(default_factory=list)
    through: bool = False
    preempted: bool = False
    _trouble: _Trouble = field(default_factory=_Trouble)
    _told_to_stop: bool = False
    _saving: set[int] = field(default_factory=set)
    _ended: set[int] = field(default_factory=set)
    _asked: bool = False
    _behind: bool = False
    _looks: bool = False
    _caught_up: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._ends = Ends(lambda: [process.pid for process in self.processes])

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
        self._ends.__enter__()
        self._thread = threading.Thread(target=self._serve, name="rank-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.through = True
        self._ends.__exit__(kind, error, trace)
        signal.set_wakeup_fd(self._outer_wakeup)
        self._wake.close()  # the thread reads what is pending, then ends
        self._thread.join()
        self._signals.close()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def ask_to_save(self) -> bool:
        """Ask all ranks to save and end; False, and nothing done, if one would not, was asked before or has failed.

        For the main thread.
        """
        self._look_back()
        running = self._running()
        if not running and self.clear:
            return self.preempted  # they heard of it themselves, and are through
        if self._asked or not self.clear or not running <= self._saving:
            return False
        self._asked = True
        _signal(running, signal.SIGTERM)
        return True

    def stop_ranks(self) -> None:
        """SIGTERM has come, and the agent is going to end its ranks: what ends from now on has not failed.

        For the main thread. It may have come because of what the death of a rank of ours has done elsewhere.
        """
        if not self._told_to_stop:
            self._look_back()
        self._stop(signal.SIGTERM)

    def _stop(self, number: signal.Signals) -> None:
        if not self._told_to_stop:
            self._told_to_stop = True
            self.stopping(number, self.clear)
        if self._asked:
            _signal(self._running(), signal.SIGKILL)  # those that save end at once

    def _look_back(self) -> None:
        """Hear what ranks have said up to now, and see which are on the way out."""
        self._caught_up.clear()
        self._wake.send(b"?")
        self._caught_up.wait(_CATCH_UP_SECONDS)

    @property
    def clear(self) -> bool:
        """Whether no rank has failed, as far as can be told."""
        return not (self._trouble.deaths or self._trouble.unexplained)

    def _running(self) -> set[int]:
        return {process.pid for process in self.processes} - self._ended

    def conclude(self, statuses: Mapping[int, int]) -> Death | None:
        """The first death, when all ranks have ended; `statuses` are what the agent knows of how they did."""
        for pid, status in statuses.items():
            self._ends.learn(pid, status)
        self._explain()
        return self._trouble.first

    @property
    def announced(self) -> bool:
        """Whether a death has been told."""
        return self._trouble.announced

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
            pending = self._trouble.began_at is not None and not self._trouble.announced
            patience = 0 if stopping or self._behind else _SETTLE_SECONDS / 2 if pending else 1.0
            ready = self._selector.select(timeout=patience)
            if not ready and self._behind:
                self._catch_up()
            if stopping and not ready:
                return
            for key, _ in ready:
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))
                elif key.fileobj is self._woken:
                    if self._woken.recv(64):
                        self._behind, self._looks = True, self._looks or not self._trouble.deaths
                    else:
                        self._selector.unregister(self._woken)
                        self._woken.close()
                        stopping = True
                elif key.fileobj is self._signalled:
                    self._hear_signals()
                else:
                    self._read(key.data)
            if not stopping and not self._behind:
                self._explain()
                if self._trouble.is_due():
                    self._trouble.announced = True
                    assert self._trouble.first is not None
                    self.announce(self._trouble.first)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            if peer.process is not None and not peer.ended:
                self._vanished(peer.process)
            return
        *lines, peer.received = (peer.received + data).split(b"\n")
        for line in lines:
            self._hear(peer, line)

    def _hear(self, peer: _Peer, line: bytes) -> None:
        if peer.process is None:
            process = peer.process = RankProcess(**json.loads(line))
            self.processes.append(process)
            return
        if line == b"saves":
            self._saving.add(peer.process.pid)
            return
        peer.ended = True
        self._ended.add(peer.process.pid)
        if line == b"interrupted":
            self._hear_signals()  # Ctrl-C, which is nobody's failure, was heard before it was passed on
        if line in (b"failed", b"interrupted"):
            self._died(Death(peer.process, recorded=True))
        elif line == b"preempted":
            self.preempted = True

    def _hear_signals(self) -> None:
        try:
            numbers = self._signalled.recv(64, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        for number in numbers:
            if number in STOPS:
                if self._told_to_stop and number == signal.SIGINT:
                    self.end_leftovers()  # a second Ctrl-C; the agent would wait for them once more
                # The agent passes it on to the ranks at the same time: who is on the way out has not failed.
                self._stop(signal.Signals(number))

    def _vanished(self, process: RankProcess) -> None:
        if sys.platform == "linux" and not self._ends.is_ending(process.pid):
            return  # a script may close descriptors that it does not know
        self._ended.add(process.pid)
        status = self._ends.status(process.pid)
        if status == 0:
            return  # os._exit(0)
        if isinstance(status, Unknown):
            if self._told_to_stop or (self._trouble.deaths and process.pid not in self._trouble.unexplained):
                return  # a consequence, or it is waited for already
            self._trouble.unexplained[process.pid] = process
        self._died(Death(process, recorded=False, signal=_killer(status)))

    def _died(self, death: Death) -> None:
        trouble = self._trouble
        expected = death.process.pid in trouble.unexplained
        if self._told_to_stop and (not expected or death.signal is signal.SIGTERM):
            return  # whoever stops us may send SIGTERM to the ranks as well
        if trouble.announced or (not expected and trouble.waited() > _SETTLE_SECONDS):
            return  # the agent is ending the others, in the end with SIGKILL
        before = trouble.first
        trouble.add(death)
        if before is None:
            self._behind = self._looks = True
        if trouble.first not in (before, None):
            self.died(trouble.first)
        if self._asked and not self._told_to_stop:
            os.kill(os.getpid(), signal.SIGTERM)  # a rank could not save: that is the end, and nothing to be restarted

    def _catch_up(self) -> None:
        """All that was said has been heard: see which ranks are on the way out, unless the agent is ending them."""
        self._behind = False
        if self._looks and not self._told_to_stop:
            self._look_around()
        self._looks = False
        self._caught_up.set()

    def _look_around(self) -> None:
        running = self._running()
        for process in tuple(self.processes):
            if process.pid in running and self._ends.is_ending(process.pid):
                self._trouble.unexplained[process.pid] = process

    def _explain(self) -> None:
        """How those ended that were on the way out; one that was killed outright may become the first."""
        trouble = self._trouble
        for pid, process in tuple(trouble.unexplained.items()):
            status = self._ends.status(pid)
            if isinstance(status, Unknown):
                continue
            del trouble.unexplained[pid]
            if status == 0:
                trouble.drop(pid)
                continue
            death = Death(process, recorded=False, signal=_killer(status))
            if trouble.announced or not (death.violent or trouble.knows(pid)):
                continue  # one that left by itself says so on its socket, and in which order
            before = trouble.first
            trouble.add(death)
            if trouble.first not in (before, None):
                self.died(trouble.first)


def _killer(status: int | Unknown) -> signal.Signals | None:
    return signal.Signals(-status) if isinstance(status, int) and status < 0 else None


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
