"""Reports a disk error outside of a step to all ranks, since they may be waiting for this rank.

Rejected: reporting it wherever a row is read, because saving a checkpoint has its own way to fail on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.engine.core.handle import Handle
from zeroshard.errors import SpillError


@contextmanager
def report_disk_errors(handle: Handle) -> Iterator[None]:
    """A context whose disk errors are also raised on the other ranks, as soon as they wait for this rank."""
    try:
        yield
    except SpillError as error:
        handle.comm.watchdog.announce(error)
        raise
