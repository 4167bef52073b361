"""The reader and writer in Python: threads that call os.preadv and os.pwritev, which let other threads run meanwhile.

What an installation without the native library takes. It moves the same bytes; requests are as large as in native code,
so that both directions of the disk stay busy.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from zeroshard.nvme.transfers import DiskStalled, FileEnded, Transfer

_THREADS = 8
_REQUEST = 1 << 20


class ThreadTransfers:
    """A Transfers of threads of Python's."""

    name = "Python, threads"

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="zeroshard-disk")

    def start(self, *, write: bool, file: int, offset: int, address: int, nbytes: int) -> Transfer:
        """See Transfers."""
        return _ThreadTransfer(
            [
                self._pool.submit(_move, write, file, offset + at, address + at, min(_REQUEST, nbytes - at))
                for at in range(0, nbytes, _REQUEST)
            ]
        )

    def close(self) -> None:
        """See Transfers."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class _ThreadTransfer:
    def __init__(self, requests: Sequence[Future[None]]) -> None:
        self._requests = requests

    def wait(self, seconds: float) -> None:
        if wait(self._requests, seconds).not_done:
            raise DiskStalled(errno.ETIMEDOUT, f"no answer in {seconds:g} seconds")
        for request in self._requests:
            request.result()


def _move(write: bool, file: int, offset: int, address: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        part = (ctypes.c_char * (nbytes - done)).from_address(address + done)
        moved = os.pwritev(file, [part], offset + done) if write else os.preadv(file, [part], offset + done)
        if moved == 0:
            raise FileEnded(errno.ENODATA, "the file ended early")
        done += moved
