"""Prints an explanation before a communication backend aborts the process.

gloo calls std::terminate from its own thread when a message has not the size that was expected (ranks issued different
collectives), NCCL when an operation fails: the process aborts with a line about sockets, and no Python exception is
ever seen. The hook below runs a Python function first, which compares the logs of the ranks and prints what diverged;
then the former handler goes on and aborts as before.

The rejected alternatives: an agreement on sizes before every collective costs a round trip each; reading the cause out
of the launcher's logs gives no unit. Only on Linux with libstdc++; elsewhere the hook is not installed and the abort
stays as terse as it was.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_HANDLER = ctypes.CFUNCTYPE(None)


class TerminateHook:
    """Calls `before_abort` when C++ gives up, from the thread that failed, then the handler that was there before."""

    def __init__(self, before_abort: Callable[[], None]) -> None:
        self._before_abort = before_abort
        self._trampoline = _HANDLER(self._run)
        self._former: int | None = None
        self._library = _libstdcxx()
        if self._library is not None:
            self._former = self._exchange(ctypes.cast(self._trampoline, ctypes.c_void_p).value)

    def remove(self) -> None:
        """Put the former handler back; needed before the interpreter ends."""
        if self._library is None:
            return
        current = self._exchange(self._former)
        if current != ctypes.cast(self._trampoline, ctypes.c_void_p).value:
            # Somebody installed a handler after us that leads back here: leave it, and let ours live on as a link.
            self._exchange(current)
            self._before_abort = _nothing
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._trampoline))
        self._library = None

    def _run(self) -> None:
        self._before_abort()
        if self._former:
            _HANDLER(self._former)()

    def _exchange(self, handler: int | None) -> int | None:
        assert self._library is not None
        exchange = self._library["_ZSt13set_terminatePFvvE"]
        exchange.restype, exchange.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        return exchange(handler)


def _libstdcxx() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None


def _nothing() -> None:
    """What a removed hook does."""
