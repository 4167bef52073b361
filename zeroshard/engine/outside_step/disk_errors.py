"""Reports a disk error outside of a step to all ranks (see engine.core.disk_failures)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.engine.core.disk_failures import disk_failures_to
from zeroshard.engine.core.handle import Handle


@contextmanager
def report_disk_errors(handle: Handle) -> Iterator[None]:
    """A context whose disk errors are also raised on the other ranks, as soon as they wait for this rank."""
    with disk_failures_to(handle.comm.watchdog.announce):
        yield
