"""SIGTERM as a request: the running step is finished, a checkpoint saved, and the process ends with its own status.

    preemption = zeroshard.Preemption(model)
    for batch in loader:
        ...                                        # forward, backward, step, scheduler
        if preemption.due():                       # on all ranks after the same step
            zeroshard.save(model, "checkpoints", f"step{step}")
            sys.exit(zeroshard.PREEMPTED)

The signal may reach one rank only; `comm/stopping.py` chooses the step after which all ranks stop. A thread receives
the signal through a wake-up file descriptor. Rejected: a Python handler, which runs only after the collective in which
the main thread waits; when a launcher ends the survivors of a lost rank by SIGTERM, that collective never ends.
Survivors of a lost rank end at once.
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
"""Exit status of a run that saved after SIGTERM; EX_TEMPFAIL of sysexits.h, "try again later"."""
FILES_VARIABLE = "ZEROSHARD_RANK_FILES"
"""Where ranks leave files for `zeroshard run`: the rank's process id, a colon, a directory."""
_LOGGER = logging.getLogger("zeroshard")


class Preemption:
    """Receives SIGTERM for all ranks; all ranks make one, in the main thread, and call `due` after each step.

    When `zeroshard run` is told to stop it passes SIGTERM to ranks that have a Preemption, and waits for their end.

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
        self._reader_end, self._writer_end = socket.socketpair()
        self._writer_end.setblocking(False)
        self._former, self._closed, self._is_asked = former, False, False
        signal.signal(signal.SIGTERM, self._handle)
        self._former_wakeup_fd = signal.set_wakeup_fd(self._writer_end.fileno(), warn_on_full_buffer=False)
        _ignore_children(self)
        self._stopping = Stopping(
            store, comm.rank, comm.ranks, watchdog, self._asked, self._end_without_saving, self._wake
        )
        atexit.register(self.close)
        _tell_launcher()

    def due(self) -> bool:
        """Called by all ranks after each step: whether to save now and to end with `PREEMPTED`; on all ranks alike."""
        return self._stopping.boundary()

    def close(self, *, patient: bool = True) -> None:
        """Restore the former handler of SIGTERM. With `patient=False` it does not wait for other ranks (lost ones)."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._stopping.close(patient=patient)
        atexit.unregister(self.close)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._former_wakeup_fd)
            signal.signal(signal.SIGTERM, self._former if self._former is not None else signal.SIG_DFL)
        self._reader_end.close()
        self._writer_end.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Does nothing: the thread reads the wake-up descriptor. A handler must exist to keep the process alive."""

    def _wake(self) -> None:
        """End a wait for SIGTERM that runs in the thread; no signal has number 0."""
        with suppress(OSError):  # full: then it wakes without this
            self._writer_end.send(bytes(1))

    def _asked(self, seconds: float) -> bool:
        """In the thread: whether SIGTERM came within the time."""
        if not select.select([self._reader_end], [], [], seconds)[0]:
            return False
        numbers = self._reader_end.recv(64).replace(bytes(1), b"")
        if self._former_wakeup_fd != -1 and numbers:
            with suppress(OSError):
                os.write(self._former_wakeup_fd, numbers)
        asked = signal.SIGTERM in numbers
        if asked:
            self._is_asked = True
            _LOGGER.warning("SIGTERM: all ranks finish their step, save and end")
        return asked

    def _end_without_saving(self, reason: str) -> None:
        """In the thread: end the process by SIGTERM's default action. Python can't set it in a thread, C can.

        In an elastic job a rank that did not get the signal itself continues, without the ranks that ended.
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


def _ignore_children(preemption: Preemption) -> None:
    """Ignore signals to forked children, such as workers of a data loader.

    Until `forget` runs a child would write to the rank's descriptor, so the signal is blocked until then.
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
    """Tell `zeroshard run`, by a file, that this rank saves at SIGTERM."""
    pid, _, directory = os.environ.get(FILES_VARIABLE, "").partition(":")
    if pid == str(os.getpid()):
        with suppress(OSError):
            Path(directory, f"{pid}.saves").touch()
