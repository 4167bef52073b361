"""A waiter for collectives without a watchdog's explanations, for streams that a test makes itself."""

from __future__ import annotations

from contextlib import AbstractContextManager

from zeroshard.comm.collectives import Pending
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.watchdog import Watchdog


class Patience:
    """Waits as long as it takes."""

    def __init__(self) -> None:
        self._watchdog = Watchdog(None, 0, 1, OperationLog())

    def waiting(self, pending: Pending) -> AbstractContextManager[None]:
        return self._watchdog.waiting("")

    def wait_up_to(self, pending: Pending, seconds: float) -> bool:
        pending.finish()
        return True
