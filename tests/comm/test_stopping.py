"""Ranks that agree on a last step part at once where the others are gone, and else after they have told their steps."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.stopping import Stopping
from zeroshard.comm.watchdog import Watchdog


def _refuse(reason: str) -> None:
    raise AssertionError(reason)


@pytest.mark.parametrize("patient", [True, False])
def test_a_thread_that_waits_is_woken_at_the_end_and_tells_only_ranks_that_are_there(patient: bool) -> None:
    store, woken = dist.HashStore(), threading.Event()

    def wait(seconds: float) -> bool:
        woken.wait()  # for as long as nobody asks
        return False

    class Shared(dist.PrefixStore):
        def clone(self) -> dist.Store:
            return store

    watchdog = Watchdog(None, 0, 1, OperationLog())
    stopping = Stopping(Shared("", store), 0, 2, watchdog, wait, _refuse, woken.set)
    assert not stopping.boundary()
    stopping.close(patient=patient)
    assert not stopping._thread.is_alive()
    assert store.check(["zeroshard/stopping/1/at/0"]) == patient
