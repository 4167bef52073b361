"""The reader and writer in native code (csrc/disk): io_uring where the kernel lets this process, else threads."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from functools import cache
from pathlib import Path

from zeroshard.native_library import load_versioned
from zeroshard.nvme.transfers import DiskStalled, FileEnded, Transfer

LIBRARY = Path(__file__).with_name("libzeroshard_disk.so")
VERSION = 1
"""What `zeroshard_disk_version` must answer."""
RING, THREADS = 0, 1
"""The kinds of engine of the library."""
DEPTHS = {RING: 32, THREADS: 8}
"""Requests of 1 MiB that are with the system at once: a fast disk is busy with 16, and more only wait there."""

_NAMES = {RING: "io_uring", THREADS: "threads"}
_ENDED_EARLY, _RUNNING = -2, -1
_CLOSING_S = 5.0
_int32, _int64, _address = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class NativeTransfers:
    """A Transfers of one engine of the library.

    Args:
        kind: RING or THREADS.

    Raises:
        OSError: the system does not have this kind.
    """

    def __init__(self, library: ctypes.CDLL, kind: int) -> None:
        self.name = f"native, {_NAMES[kind]}"
        self._library = library
        self._engine = library.zeroshard_disk_open(kind, DEPTHS[kind])
        if not self._engine:
            raise OSError(errno.ENOSYS, f"{_NAMES[kind]} is not to be had")
        self._finalizer = weakref.finalize(self, _close, library, self._engine, os.getpid())

    def start(self, *, write: bool, file: int, offset: int, address: int, nbytes: int) -> Transfer:
        """See Transfers."""
        begun = self._library.zeroshard_disk_submit(self._engine, write, file, offset, address, nbytes)
        if not begun:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return _NativeTransfer(self, begun)

    def wait(self, begun: int, seconds: float) -> None:
        """See Transfer."""
        code = self._library.zeroshard_disk_wait(self._engine, begun, seconds)
        if code == _RUNNING:
            raise DiskStalled(errno.ETIMEDOUT, f"no answer in {seconds:g} seconds")
        if code == _ENDED_EARLY:
            raise FileEnded(errno.ENODATA, "the file ended early")
        if code:
            raise OSError(code, os.strerror(code))

    def close(self) -> None:
        """See Transfers."""
        self._finalizer()


class _NativeTransfer:
    def __init__(self, transfers: NativeTransfers, begun: int) -> None:
        self._transfers, self._begun = transfers, begun

    def wait(self, seconds: float) -> None:
        self._transfers.wait(self._begun, seconds)


def _close(library: ctypes.CDLL, engine: int, process: int) -> None:
    if process == os.getpid():  # threads do not come along into a fork, and can't be waited for there
        library.zeroshard_disk_close(engine, _CLOSING_S)


@cache
def load_library(path: Path = LIBRARY) -> ctypes.CDLL | None:
    """The library; None where it was not built, or is of another version. Nothing is compiled."""
    library, _ = load_versioned(path, "disk", VERSION)
    if library is None:
        return None
    library.zeroshard_disk_open.argtypes = [_int32, _int32]
    library.zeroshard_disk_open.restype = _address
    library.zeroshard_disk_submit.argtypes = [_address, _int32, _int32, _int64, _address, _int64]
    library.zeroshard_disk_submit.restype = _address
    library.zeroshard_disk_wait.argtypes = [_address, _address, ctypes.c_double]
    library.zeroshard_disk_wait.restype = _int32
    library.zeroshard_disk_close.argtypes = [_address, ctypes.c_double]
    library.zeroshard_disk_close.restype = _int32
    return library
