"""A disk that fails under a reader or writer outside of a step: all ranks are told, for they may wait for this one.

Rejected: telling them wherever a row is read. A checkpoint that can't be written has its own way to end on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.engine.core.handle import Handle
from zeroshard.errors import SpillError


@contextmanager
def telling_all(handle: Handle) -> Iterator[None]:
    """Inside, an error of a disk is raised on the other ranks too, as soon as they wait for this one."""
    try:
        yield
    except SpillError as error:
        handle.comm.watchdog.announce(error)
        raise
