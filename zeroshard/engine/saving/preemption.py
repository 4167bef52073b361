"""SIGTERM as a request: the running step is finished, a checkpoint saved, and the process ends with its own status.

    preemption = zeroshard.Preemption(model)
    for batch in loader:
        ...                                        # forward, backward, step, scheduler
        if preemption.due():                       # on all ranks after the same step
            zeroshard.save(model, "checkpoints", f"step{step}")
            sys.exit(zeroshard.PREEMPTED)

The signal may reach one rank only; `comm/stopping.py` finds the step. It is heard by a thread, through the descriptor
that C code writes to: a Python handler would run only when a collective that the main thread waits in has ended, and
when a launcher ends the survivors of a dead rank by SIGTERM, that collective never ends. They end at once then.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import select
import signal
import socket
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from types import FrameType, MethodType

from torch import nn

from zeroshard.comm.stopping import Stopping
from zeroshard.elastic.session import current_session
from zeroshard.engine.core.handle import handle_of
from zeroshard.errors import UsageError

PREEMPTED = 75
"""Exit status of a run that was told to stop and has saved; EX_TEMPFAIL of sysexits.h, "try again later"."""
FILES_VARIABLE = "ZEROSHARD_RANK_FILES"
"""Where `zeroshard run` looks for what its ranks say: the number of the rank's process, a colon, a directory."""
_LOGGER = logging.getLogger("zeroshard")


class Preemption:
    """Hears SIGTERM for all ranks; made and asked by all ranks, one per process, in the main thread.

    Where `zeroshard run` is told to stop it passes SIGTERM to ranks that have one of these, and waits for them as long
    as they take.

    Raises:
        UsageError: in another thread than the main one, or beside another `Preemption`.
    """

    def __init__(self, model: nn.Module) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("Preemption: signals can be heard in the main thread only; make it there")
        former = signal.getsignal(signal.SIGTERM)
        if isinstance(former, MethodType) and isinstance(former.__self__, Preemption):
            raise UsageError("Preemption: this process has one already, which saves one model; close it first")
        handle = handle_of(model)
        comm = handle.comm
        store, watchdog = comm.mesh.store(), comm.watchdog
        if comm.stages is not None:
            store, watchdog = comm.stages.store, comm.stages.watchdog
        self._elastic = current_session() is not None
        self._pid = os.getpid()
        self._heard, self._written = socket.socketpair()
        self._written.setblocking(False)
        self._former, self._closed, self._is_asked = former, False, False
        signal.signal(signal.SIGTERM, self._handle)
        self._outer = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        _leave_out_children(self)
        self._stopping = Stopping(
            store, comm.rank, comm.ranks, watchdog, self._asked, self._end_without_saving, self._wake
        )
        atexit.register(self.close)
        _tell_launcher()

    def due(self) -> bool:
        """Called by all ranks after each step: whether to save now and to end with `PREEMPTED`; on all ranks alike."""
        return self._stopping.boundary()

    def close(self, *, patient: bool = True) -> None:
        """Hear no more: SIGTERM does what it did before. Not `patient` where other ranks are gone."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._stopping.close(patient=patient)
        atexit.unregister(self.close)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._outer)
            signal.signal(signal.SIGTERM, self._former if self._former is not None else signal.SIG_DFL)
        self._heard.close()
        self._written.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Everything is done where the wake-up is read; that there is a handler keeps the process alive."""

    def _wake(self) -> None:
        """End a wait for SIGTERM that runs in the thread; no signal has number 0."""
        with suppress(OSError):  # full: then it wakes without this
            self._written.send(bytes(1))

    def _asked(self, seconds: float) -> bool:
        """In the thread: whether SIGTERM came within the time."""
        if not select.select([self._heard], [], [], seconds)[0]:
            return False
        numbers = self._heard.recv(64).replace(bytes(1), b"")
        if self._outer != -1 and numbers:
            with suppress(OSError):
                os.write(self._outer, numbers)
        asked = signal.SIGTERM in numbers
        if asked:
            self._is_asked = True
            _LOGGER.warning("SIGTERM: all ranks finish their step, save and end")
        return asked

    def _end_without_saving(self, reason: str) -> None:
        """In the thread: end as if SIGTERM had never been heard. Python can set handlers in the main thread only.

        In an elastic job a rank that was not itself asked goes on: those that are left will train without the others.
        """
        if self._elastic and not self._is_asked:
            _LOGGER.info("another rank was asked to stop, but %s", reason)
            return
        _LOGGER.error("asked to stop, but %s: ending without a checkpoint", reason)
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
        os.kill(os.getpid(), signal.SIGTERM)

    def forget(self) -> None:
        """In a forked child: SIGTERM does what it does by default."""
        if not self._closed and threading.current_thread() is threading.main_thread():
            self._closed = True
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave_out_children(preemption: Preemption) -> None:
    """The signals of forked children, such as workers of a data loader, are not the rank's.

    A child writes to the rank's descriptor until `forget` has run, so the signal waits for that.
    """
    own = weakref.ref(preemption)
    masks: list[set[signal.Signals]] = []

    def before() -> None:
        if own() is not None:
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]))  # pyright: ignore[reportArgumentType]

    def after() -> None:
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def after_in_child() -> None:
        found = own()
        if found is not None:
            found.forget()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


def _tell_launcher() -> None:
    """That this rank saves at SIGTERM, by a file for which the agent of `zeroshard run` looks."""
    pid, _, directory = os.environ.get(FILES_VARIABLE, "").partition(":")
    if pid == str(os.getpid()):
        with suppress(OSError):
            Path(directory, f"{pid}.saves").touch()
