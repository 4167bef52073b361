"""Barriers of a rank that the watchdog interrupts are released until the memory is closed, and else never."""

from __future__ import annotations

import threading

import torch

from zeroshard.comm.collectives import Pending
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.peers import Channel, Peers
from zeroshard.comm.watchdog import Watchdog
from zeroshard.errors import RanksChanged


class _Memory:
    """Memory of one rank that counts how often its barriers were released, and what the watchdog knew then."""

    rank, size = 0, 1

    def __init__(self, nbytes: int, watchdog: Watchdog) -> None:
        self._bytes, self._watchdog = torch.zeros(nbytes, dtype=torch.uint8), watchdog
        self.released: list[object] = []
        self.twice = threading.Event()

    def of(self, rank: int) -> torch.Tensor:
        return self._bytes

    def barrier(self, channel: Channel, event: object) -> Pending:
        return Pending("barrier", channel.name.lower())

    def release(self) -> None:
        self.released.append(self._watchdog.error)
        if len(self.released) > 1:
            self.twice.set()


def _peers() -> tuple[Watchdog, Peers, _Memory]:
    log = OperationLog()
    watchdog = Watchdog(None, 0, 1, log)
    memories: list[_Memory] = []

    def make(nbytes: int) -> _Memory:
        memories.append(_Memory(nbytes, watchdog))
        return memories[-1]

    peers = Peers(make, log, watchdog)
    peers.open("shards", [16])
    return watchdog, peers, memories[0]


def test_barriers_are_released_after_the_error_is_set_and_until_the_memory_is_closed() -> None:
    watchdog, peers, memory = _peers()
    lost = RanksChanged("rank 1 is lost")
    watchdog.interrupt(lost)
    assert memory.twice.wait(10)
    peers.close()
    count = len(memory.released)
    assert set(memory.released) == {lost}
    watchdog.interrupt(lost)
    assert len(memory.released) == count


def test_a_rank_that_leaves_with_the_others_releases_nothing() -> None:
    watchdog, peers, memory = _peers()
    peers.close()
    watchdog.interrupt(RanksChanged("the ranks have changed"))
    assert not memory.twice.wait(0.1)
    assert not memory.released
