"""Lets the ranks of an elastic job leave a round together: after the same step when nodes join or leave the job.

`comm/stopping.py` chooses the step, as for SIGTERM. Otherwise a step costs only a counter.
"""

from __future__ import annotations

import logging
from typing import NoReturn

from torch import nn

from zeroshard.comm.stopping import Stopping
from zeroshard.elastic.session import Session
from zeroshard.engine.core.handle import handle_of

_LOGGER = logging.getLogger("zeroshard")


class Leaving:
    """Asked by all ranks of `model` after each step; made by all of them."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        comm = handle_of(model).comm
        store, watchdog = comm.mesh.store(), comm.watchdog
        session.interrupt_on_trouble(watchdog)
        if comm.stages is not None:
            store, watchdog = comm.stages.store, comm.stages.watchdog
            session.interrupt_on_trouble(watchdog)
        self._session, self._watchdog = session, watchdog
        self._stopping = Stopping(store, comm.rank, comm.ranks, watchdog, session.asked.wait, self._leave_within_step)

    def due(self, steps: int) -> bool:
        """Called after step number `steps`; whether it was the last one of the round, which is equal on all ranks.

        Raises:
            RanksChanged: a rank is lost, so that the step may be wrong.
        """
        self._watchdog.raise_if_failed()
        self._session.note_step(steps)
        return self._stopping.boundary()

    def leave(self) -> NoReturn:
        """Leave the round, with all ranks. Raises RanksChanged, or SystemExit where the process does not go on."""
        self._session.leave("nodes join or leave")

    def close(self, *, patient: bool = True) -> None:
        """No step follows here. Not `patient` where other ranks are gone."""
        self._stopping.close(patient=patient)

    def _leave_within_step(self, reason: str) -> None:
        """In the thread: the ranks can't agree on a step, which the node hears of as well."""
        _LOGGER.info("leaving the round within a step: %s", reason)
