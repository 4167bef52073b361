"""Ranks that do a part of a save or load each, and go on only if all of them could.

CollectiveBarrier   one all-reduce per step, in the main thread: it is in the operation log like all others, so a
                    rank that saves while another trains ends in a DivergenceError within seconds
StoreBarrier        through the process group's store, for a thread that writes while the main thread trains: a
                    collective of its own would need a communicator, and mix with the training's on a device
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.watchdog import Watchdog
from zeroshard.errors import CheckpointError, ZeroShardError

T = TypeVar("T")
LABEL = "(checkpoint: all ranks save and load together)"
"""What the log calls collectives of saves and loads; it is in the error when one rank issues them alone."""
_TOLD_NBYTES = 2000
_POLL_S = 0.02
_ALONE_S = 60.0
"""How long a thread waits for its peers after its own main thread has ended."""


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, as it says."""

    rank: int
    problem: str


class ErrorBarrier(Protocol):
    """A barrier at which ranks learn whether the others could do their part."""

    rank: int
    size: int

    def first_failure(self, problem: str | None) -> Failure | None:
        """Called by all ranks with what went wrong; the failure of the lowest rank, None where nothing did."""
        ...


class CollectiveBarrier:
    """All ranks' main threads, by an all-reduce."""

    def __init__(self, control: Collectives, device: torch.device) -> None:
        self.rank, self.size = control.rank, control.size
        self._control, self._device = control, device

    def first_failure(self, problem: str | None) -> Failure | None:
        """See ErrorBarrier."""
        flag = torch.tensor([self.size if problem is None else self.rank], dtype=torch.int64, device=self._device)
        self._control.wait(self._control.all_reduce(flag, LABEL, op=dist.ReduceOp.MIN))
        rank = int(flag)
        return None if rank == self.size else Failure(rank, self.broadcast_text(problem or "", rank))

    def broadcast_text(self, text: str, source: int) -> str:
        """Called by all ranks; the text of rank `source`, of which 2000 bytes are told."""
        content = text.encode(errors="replace")[:_TOLD_NBYTES] if self.rank == source else b""
        told = torch.frombuffer(bytearray(content.ljust(_TOLD_NBYTES, b"\0")), dtype=torch.uint8).to(self._device)
        self._control.wait(self._control.broadcast(told, source, LABEL))
        return bytes(told.tolist()).rstrip(b"\0").decode(errors="replace")

    def all_equal(self, text: str) -> bool:
        """Called by all ranks; whether all gave the same text."""
        value = zlib.crc32(text.encode())
        bounds = torch.tensor([value, -value], dtype=torch.int64, device=self._device)
        self._control.wait(self._control.all_reduce(bounds, LABEL, op=dist.ReduceOp.MAX))
        return int(bounds[0]) == -int(bounds[1])


class StoreBarrier:
    """All ranks' threads, by counters in the store. `name` is equal on all ranks and used once."""

    def __init__(self, store: dist.Store | None, rank: int, size: int, name: str, watchdog: Watchdog) -> None:
        self.rank, self.size = rank, size
        self._store: dist.Store | None = None
        if store is not None:  # a client serves one call at a time, so the thread gets its own
            self._store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (torch's stub lacks it)
        self._name, self._watchdog = name, watchdog
        self._phase = 0

    def first_failure(self, problem: str | None) -> Failure | None:
        """See ErrorBarrier. Raises ZeroShardError where the other ranks are gone."""
        if self._store is None:
            return None if problem is None else Failure(0, problem)
        key = f"zeroshard/checkpoint/{self._name}/{self._phase}"
        self._phase += 1
        if problem is not None:
            self._store.set(f"{key}/failed/{self.rank}", problem[:_TOLD_NBYTES])
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
        for rank in range(self.size):
            if self._store.check([f"{key}/failed/{rank}"]):
                return Failure(rank, self._store.get(f"{key}/failed/{rank}").decode(errors="replace"))
        return None


class _Part:
    """A rank's part of what ranks do together: whatever goes wrong in it is kept, for the others wait for this rank.

    A context manager, as it takes every error and not those that somebody thought of; what ends the process
    (KeyboardInterrupt, SystemExit) passes.
    """

    def __init__(self, where: object) -> None:
        self._where = where
        self.problem: Exception | None = None
        self.told: str | None = None

    def __enter__(self) -> _Part:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.told = str(error)
        if isinstance(error, (ZeroShardError, Warning)):  # warnings that are to be errors
            self.problem = error
            return True
        if isinstance(error, OSError) and error.filename:
            self.told = f"{error.filename}: {error.strerror}"
        elif not isinstance(error, OSError):
            self.told = f"{type(error).__name__}: {error}"
        self.problem = CheckpointError(f"checkpoint {self._where}: {self.told}")
        self.problem.__cause__ = error
        return True


def on_all_ranks(barrier: ErrorBarrier, work: Callable[[], T], where: object, consequence: str = "") -> T:
    """Run `work` on all ranks; returns what it gave here if it succeeded everywhere, so it is a barrier too.

    Args:
        consequence: what a failure elsewhere means here, for the message.

    Raises:
        CheckpointError: it failed on another rank, which is named with its cause, or here for a reason that is no
            error of zeroshard.
        ZeroShardError: it failed here.
    """
    done: list[T] = []
    with _Part(where) as part:
        done.append(work())
    try:
        failed = barrier.first_failure(part.told)
    except (ZeroShardError, RuntimeError):
        if part.problem is not None:
            raise part.problem from part.problem.__cause__
        raise
    if part.problem is not None:
        raise part.problem
    if failed is not None:
        raise CheckpointError(f"checkpoint {where}: rank {failed.rank} failed: {failed.problem}{consequence}")
    return done[0]
