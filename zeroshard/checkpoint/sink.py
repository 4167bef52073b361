"""Writes a file from beginning to end, so that it is on the disk when `finish` returns.

    small   write, fsync
    large   two aligned buffers; one is filled while a thread writes the other with direct I/O (O_DIRECT)

Writes of a large state through the page cache fill memory that training needs, and cost another copy. On file systems
without direct I/O (tmpfs, some network file systems) large files are written like small ones.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

DIRECT_FROM = 64 << 20
"""Bytes from which on a file is written with direct I/O."""
_BUFFER = 16 << 20
_ALIGNMENT = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)


class Sink(ABC):
    """A file being written; a context manager that closes it."""

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Append bytes; `data` may be reused afterwards. Raises OSError if these or earlier bytes can't be written."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all bytes are on the disk. Raises OSError as `write`."""

    @abstractmethod
    def close(self) -> None:
        """Close the file, also if not all was written."""


class PlainSink(Sink):
    """Writes the bytes as they come."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: memoryview) -> None:
        _write_all(self._descriptor, data)

    def finish(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        """See Sink."""
        os.close(self._descriptor)


class DirectSink(Sink):
    """Writes aligned buffers with direct I/O, in a thread of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffers = [mmap.mmap(-1, _BUFFER) for _ in range(2)]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-write")
        self._writing: Future[Any] | None = None
        self._filled = 0

    def write(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            count = min(len(data) - done, _BUFFER - self._filled)
            self._buffers[0][self._filled : self._filled + count] = data[done : done + count]
            self._filled += count
            done += count
            if self._filled == _BUFFER:
                self._send()

    def _send(self) -> None:
        self._wait()
        full = self._buffers[0]
        self._writing = self._thread.submit(_write_all, self._descriptor, memoryview(full))
        self._buffers.reverse()
        self._filled = 0

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing, writing = None, self._writing
            writing.result()

    def finish(self) -> None:
        self._wait()
        aligned = self._filled - self._filled % _ALIGNMENT
        rest = memoryview(self._buffers[0])
        _write_all(self._descriptor, rest[:aligned])
        # The end of the file is no multiple of a disk's block, so it is written without direct I/O.
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~_DIRECT)
        _write_all(self._descriptor, rest[aligned : self._filled])
        os.fsync(self._descriptor)

    def close(self) -> None:
        """See Sink."""
        self._thread.shutdown(wait=True)
        os.close(self._descriptor)


def open_sink(file: Path, nbytes: int) -> Sink:
    """A new file for `nbytes` bytes. Raises OSError if it can't be made."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if nbytes >= DIRECT_FROM and _DIRECT:
        try:
            return DirectSink(os.open(file, flags | _DIRECT, 0o666))
        except OSError:  # no direct I/O here; any other problem shows below, too
            file.unlink(missing_ok=True)
    return PlainSink(os.open(file, flags, 0o666))


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
