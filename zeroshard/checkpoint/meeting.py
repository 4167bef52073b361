"""Ranks that do a part of a save or load each, and go on only if all of them could.

CollectiveMeeting   one all-reduce per step, in the main thread: it is in the operation log like all others, so a
                    rank that saves while another trains ends in a DivergenceError within seconds
StoreMeeting        through the process group's store, for a thread that writes while the main thread trains: a
                    collective of its own would need a communicator, and mix with the training's on a device
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.watchdog import Watchdog
from zeroshard.errors import CheckpointError, ZeroShardError

T = TypeVar("T")
LABEL = "(checkpoint: all ranks save and load together)"
"""What the log calls collectives of saves and loads; it is in the error when one rank issues them alone."""
_POLL_S = 0.02
_ALONE_S = 60.0
"""How long a thread waits for its peers after its own main thread has ended."""


class Meeting(Protocol):
    """Where ranks learn how the others fared."""

    rank: int
    size: int

    def first_failed(self, failed: bool) -> int | None:
        """Called by all ranks; the lowest rank that failed, None where none did."""
        ...


class CollectiveMeeting:
    """All ranks' main threads, by an all-reduce."""

    def __init__(self, control: Collectives, device: torch.device) -> None:
        self.rank, self.size = control.rank, control.size
        self._control, self._device = control, device

    def first_failed(self, failed: bool) -> int | None:
        """See Meeting."""
        flag = torch.tensor([self.rank if failed else self.size], dtype=torch.int64, device=self._device)
        self._control.wait(self._control.all_reduce(flag, LABEL, op=dist.ReduceOp.MIN))
        return None if int(flag) == self.size else int(flag)

    def same(self, text: str) -> bool:
        """Called by all ranks; whether all gave the same text."""
        value = zlib.crc32(text.encode())
        bounds = torch.tensor([value, -value], dtype=torch.int64, device=self._device)
        self._control.wait(self._control.all_reduce(bounds, LABEL, op=dist.ReduceOp.MAX))
        return int(bounds[0]) == -int(bounds[1])


class StoreMeeting:
    """All ranks' threads, by counters in the store. `name` is equal on all ranks and used once."""

    def __init__(self, store: dist.Store | None, rank: int, size: int, name: str, watchdog: Watchdog) -> None:
        self.rank, self.size = rank, size
        self._store: dist.Store | None = None
        if store is not None:  # a client serves one call at a time, so the thread gets its own
            self._store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (torch's stub lacks it)
        self._name, self._watchdog = name, watchdog
        self._phase = 0

    def first_failed(self, failed: bool) -> int | None:
        """See Meeting. Raises ZeroShardError where the other ranks are gone."""
        if self._store is None:
            return 0 if failed else None
        key = f"zeroshard/checkpoint/{self._name}/{self._phase}"
        self._phase += 1
        if failed:
            self._store.set(f"{key}/failed/{self.rank}", "failed")
        self._store.add(f"{key}/came", 1)
        left_alone: float | None = None
        while self._store.add(f"{key}/came", 0) < self.size:
            if self._watchdog.error is not None:
                raise CheckpointError(f"the save was given up: {self._watchdog.error}")
            if not threading.main_thread().is_alive():
                left_alone = left_alone or time.monotonic()
                if time.monotonic() - left_alone > _ALONE_S:
                    raise CheckpointError("the save was given up: the other ranks did not finish their part")
            time.sleep(_POLL_S)
        failures = [rank for rank in range(self.size) if self._store.check([f"{key}/failed/{rank}"])]
        return failures[0] if failures else None


def together(meeting: Meeting, work: Callable[[], T], where: Path, consequence: str = "") -> T:
    """Run `work` on all ranks; returns what it gave here if it succeeded everywhere, so it is a barrier too.

    Args:
        consequence: what a failure elsewhere means here, for the message.

    Raises:
        CheckpointError: it failed here, or on another rank.
    """
    done: list[T] = []
    problem: ZeroShardError | None = None
    try:
        done.append(work())
    except ZeroShardError as error:
        problem = error
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        problem = CheckpointError(f"checkpoint {where}: {what}")
        problem.__cause__ = error
    try:
        failed = meeting.first_failed(problem is not None)
    except (ZeroShardError, RuntimeError):
        if problem is not None:
            raise problem from None
        raise
    if problem is not None:
        raise problem
    if failed is not None:
        raise CheckpointError(f"checkpoint {where}: rank {failed} failed, its own error says why{consequence}")
    return done[0]
