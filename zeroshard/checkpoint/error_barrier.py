"""Barriers at which ranks, each with a part of a save or load, learn whether all of them succeeded.

CollectiveBarrier   one all-reduce per step, in the main thread. It is in the operation log like all collectives, so a
                    rank that saves while another trains ends in a DivergenceError within seconds
StoreBarrier        counters in the process group's store, for a thread that writes while the main thread trains. A
                    collective would need a communicator of its own, and would run beside the training's on a device
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
"""The label of collectives of saves and loads in the operation log and in errors."""
_TEXT_NBYTES = 2000
_POLL_S = 0.02
_ALONE_S = 60.0
"""Seconds that a thread waits for its peers after its own main thread has ended."""


@dataclass(frozen=True)
class Failure:
    """The problem of a rank, in its own words."""

    rank: int
    problem: str


class ErrorBarrier(Protocol):
    """A barrier at which ranks learn whether the others succeeded."""

    rank: int
    size: int

    def first_failure(self, problem: str | None) -> Failure | None:
        """Called by all ranks, each with its problem or None; the failure of the lowest rank, None if there is none."""
        ...


class CollectiveBarrier:
    """A barrier of all ranks' main threads, by an all-reduce."""

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
        """Called by all ranks; the first 2000 bytes of the text of rank `source`."""
        content = text.encode(errors="replace")[:_TEXT_NBYTES] if self.rank == source else b""
        sent = torch.frombuffer(bytearray(content.ljust(_TEXT_NBYTES, b"\0")), dtype=torch.uint8).to(self._device)
        self._control.wait(self._control.broadcast(sent, source, LABEL))
        return bytes(sent.tolist()).rstrip(b"\0").decode(errors="replace")

    def all_equal(self, text: str) -> bool:
        """Called by all ranks; whether all have the same text."""
        value = zlib.crc32(text.encode())
        bounds = torch.tensor([value, -value], dtype=torch.int64, device=self._device)
        self._control.wait(self._control.all_reduce(bounds, LABEL, op=dist.ReduceOp.MAX))
        return int(bounds[0]) == -int(bounds[1])


class StoreBarrier:
    """A barrier of threads of all ranks, by counters in the store.

    Args:
        store: None for a single rank.
        name: a name that is equal on all ranks and used once.
    """

    def __init__(self, store: dist.Store | None, rank: int, size: int, name: str, watchdog: Watchdog) -> None:
        self.rank, self.size = rank, size
        self._store: dist.Store | None = None
        if store is not None:  # a client serves one call at a time, so the thread needs its own
            self._store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (torch's stub lacks it)
        self._name, self._watchdog = name, watchdog
        self._phase = 0

    def first_failure(self, problem: str | None) -> Failure | None:
        """See ErrorBarrier. Raises CheckpointError if the other ranks have ended."""
        if self._store is None:
            return None if problem is None else Failure(0, problem)
        key = f"zeroshard/checkpoint/{self._name}/{self._phase}"
        self._phase += 1
        if problem is not None:
            self._store.set(f"{key}/failed/{self.rank}", problem[:_TEXT_NBYTES])
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


class _KeptErrors:
    """A context that keeps an error instead of raising it, since other ranks wait for this rank at the barrier.

    It keeps every Exception; KeyboardInterrupt and SystemExit pass. `problem` is the error, `text` what the others
    learn.
    """

    def __init__(self, where: object) -> None:
        self._where = where
        self.problem: Exception | None = None
        self.text: str | None = None

    def __enter__(self) -> _KeptErrors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.text = str(error)
        if isinstance(error, (ZeroShardError, Warning)):  # warnings that are to be errors
            self.problem = error
            return True
        if isinstance(error, OSError) and error.filename:
            self.text = f"{error.filename}: {error.strerror}"
        elif not isinstance(error, OSError):
            self.text = f"{type(error).__name__}: {error}"
        self.problem = CheckpointError(f"checkpoint {self._where}: {self.text}")
        self.problem.__cause__ = error
        return True


def on_all_ranks(barrier: ErrorBarrier, work: Callable[[], T], where: object, consequence: str = "") -> T:
    """Run `work` on all ranks, as a barrier; returns its result here if it succeeded on all ranks.

    Args:
        where: the checkpoint, for messages.
        consequence: what a failure on another rank means, for the message.

    Raises:
        CheckpointError: it failed on another rank, which is named with its cause, or here with an error that is not
            zeroshard's.
        ZeroShardError: it failed here with such an error.
    """
    done: list[T] = []
    with _KeptErrors(where) as kept:
        done.append(work())
    try:
        failed = barrier.first_failure(kept.text)
    except (ZeroShardError, RuntimeError):
        if kept.problem is not None:
            raise kept.problem from kept.problem.__cause__
        raise
    if kept.problem is not None:
        raise kept.problem
    if failed is not None:
        raise CheckpointError(f"checkpoint {where}: rank {failed.rank} failed: {failed.problem}{consequence}")
    return done[0]
