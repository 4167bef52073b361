"""Lets the host wait for a collective, which the watchdog explains if it fails and ends after a divergence."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta

from zeroshard.comm.collectives import Pending
from zeroshard.comm.watchdog import Watchdog
from zeroshard.errors import ZeroShardError


class Waiter:
    """Waits for collectives in short pieces, so that the caller can look after other things in between."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def waiting(self, pending: Pending) -> AbstractContextManager[None]:
        """A context around all pieces of one wait; the watchdog's patience counts from its start."""
        return self._watchdog.waiting(pending.description)

    def wait_up_to(self, pending: Pending, seconds: float) -> bool:
        """Wait at most about `seconds`; whether the collective has finished.

        Raises DivergenceError when ranks issued different collectives, ZeroShardError when a rank is gone.
        """
        try:
            if pending.is_completed():
                pending.finish()
                return True
            if pending.finish_within(timedelta(seconds=seconds)):
                return True
        except RuntimeError as error:
            if isinstance(error, ZeroShardError):
                raise
            raise self._watchdog.explain_failure(pending.description, error) from error
        self._watchdog.raise_if_failed()
        return False
