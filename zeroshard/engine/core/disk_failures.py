"""Reports a disk that fails on one rank to all ranks, since they may be waiting for this one.

Rejected: reporting it wherever a row is read or written, because saving and loading checkpoints have their own way to
fail on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zeroshard.errors import SpillError

Report = Callable[[SpillError], None]


@contextmanager
def disk_failures_to(report: Report | None) -> Iterator[None]:
    """A context whose disk errors are given to `report` before they are raised; None reports to nobody."""
    try:
        yield
    except SpillError as error:
        if report is not None:
            report(error)
        raise
