"""Moving bytes between memory and open files while something else runs: what a reader and writer has to do.

    native.py         io_uring, or threads of native code          chosen where the library was built
    python_twin.py    threads of Python's                          the same behaviour, for everywhere else

Memory, offsets and lengths are multiples of a block, as direct I/O wants it; whoever calls sees to that. An error comes
out of `wait`, on the thread that waits. Rejected: asyncio, which has no file I/O of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

BLOCK = 4096
"""Bytes: what direct I/O moves at least, on every disk of today."""
PATIENCE_S = 120.0
"""Seconds after which a disk that does not answer is taken for stalled. A busy one answers within a few."""


def in_blocks(nbytes: int) -> int:
    """The bytes that a row of `nbytes` takes on disk, and in a window: whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class FileEnded(OSError):
    """The file ended before all bytes were there."""


class DiskStalled(OSError):
    """The disk did not answer in time."""


class Transfer(Protocol):
    """One read or write under way."""

    def wait(self, seconds: float) -> None:
        """Return when all bytes have moved; called once.

        Raises:
            OSError: as the system says.
            FileEnded: a part of the bytes was not there.
            DiskStalled: no answer after so many seconds. The memory must stay.
        """
        ...


class Transfers(Protocol):
    """A reader and writer of files.

    Attributes:
        name: how it moves bytes, for reports.
    """

    name: str

    def start(self, *, write: bool, file: int, offset: int, address: int, nbytes: int) -> Transfer:
        """Move `nbytes` between memory at `address` and an open file at `offset`."""
        ...

    def close(self) -> None:
        """Start nothing more and wait for what is under way, a few seconds at most."""
        ...


MakeTransfers = Callable[[], Transfers]
