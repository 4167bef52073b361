"""This process in one round of an elastic job: messages of its node, and what is closed at the end of the round.

    node --trouble--> session --interrupt--> watchdogs: waits for other ranks end in an error
         --regroup--> session.asked, which the engine checks: all ranks leave after the same step

The session is in a context variable, which `run_elastic` sets for each round. A script without `run_elastic` gets one
when its engine is made; its process can't continue in the next round, so it is ended and started again.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import NoReturn, Protocol

import torch.distributed as dist

from zeroshard.elastic.place import Place, connect_node, local_rank, place_in
from zeroshard.errors import RanksChanged, UsageError, ZeroShardError

_LEAVES_SECONDS = 60.0


class Interruptible(Protocol):
    """In which the main thread waits for other ranks: a watchdog."""

    def interrupt(self, error: ZeroShardError) -> None:
        """Called by another thread: end the present wait, or the next one, with this error."""
        ...


class Session:
    """This process in the round of `place`.

    Args:
        stays: whether the process continues in the next round.
        most_steps: the number of steps that the job is known to have made.

    Attributes:
        asked: set when all ranks are to leave between two steps, and when the round is in trouble.
        trouble: why the round can't continue; None if it can.
    """

    def __init__(self, place: Place, *, stays: bool, most_steps: int = 0) -> None:
        self.place, self.stays, self.most_steps = place, stays, most_steps
        self.asked = threading.Event()
        self.trouble: str | None = None
        self.engine: object | None = None
        self._communicators: list[dist.ProcessGroup] = []
        self._closers: list[Callable[[], None]] = []
        self._waits: weakref.WeakSet[Interruptible] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._node = connect_node()
        request = {"op": "watch", "local_rank": local_rank(), "stays": stays}
        self._node.sendall(json.dumps(request).encode() + b"\n")
        threading.Thread(target=self._listen, name="zeroshard-session", daemon=True).start()

    def on_end(self, close: Callable[[], None]) -> None:
        """Register `close`, which is called when the round ends; it must not wait for other ranks."""
        self._closers.append(close)

    def interrupt_on_trouble(self, waits: Interruptible) -> None:
        """Register `waits`, which is interrupted when the round is in trouble, now or later."""
        with self._lock:
            self._waits.add(waits)
            trouble = self.trouble
        if trouble is not None:
            waits.interrupt(RanksChanged(trouble))

    def register_engine(self, engine: object, communicators: Sequence[dist.ProcessGroup]) -> None:
        """Register the one engine that trains, between whose steps ranks leave. Raises UsageError for a second one.

        Args:
            communicators: the process groups that were made for it.
        """
        if self.engine is not None and self.engine is not engine:
            raise UsageError(
                "a second training engine in an elastic job: ranks leave a round between two steps of one engine; "
                "train with one engine, or in a job with a fixed number of nodes"
            )
        self.engine, self._communicators = engine, list(communicators)

    def interrupt(self, why: str) -> None:
        """The round can't continue: waits for other ranks end, the present ones and later ones."""
        with self._lock:
            self.trouble = why
            waits = list(self._waits)
        for one in waits:
            one.interrupt(RanksChanged(why))

    def note_step(self, step: int) -> None:
        """A step is made: one rank of each node tells its node, which counts failures without a step."""
        self.most_steps = max(self.most_steps, step)
        if local_rank() == 0:
            with suppress(OSError):  # the node has ended, and ends this process
                self._node.sendall(json.dumps({"op": "step", "step": step}).encode() + b"\n")

    def leave(self, why: str) -> NoReturn:
        """Leave the round between two steps, as all ranks do.

        Raises:
            RanksChanged: the process continues in the next round.
            SystemExit: it does not.
        """
        if self.stays:
            raise RanksChanged(why)
        request = {"op": "gate", "local_rank": local_rank(), "left": self.place.round, "trouble": "", "restart": True}
        with connect_node() as node:
            node.sendall(json.dumps(request).encode() + b"\n")
            node.settimeout(_LEAVES_SECONDS)
            with suppress(OSError):
                node.recv(1)  # nothing comes: the node ends this process
        raise SystemExit(1)

    def end(self) -> list[dist.ProcessGroup]:
        """Call what `on_end` registered, the last first, and drop the engine.

        Returns:
            The engine's communicators, on which operations that a lost rank does not answer may still be running.
        """
        while self._closers:
            self._closers.pop()()
        self.engine = None
        made, self._communicators = self._communicators, []
        return made

    def close(self) -> None:
        """Close the connection. Its node takes a rank that has none and is not at the gate for one that hangs."""
        with suppress(OSError):
            self._node.shutdown(socket.SHUT_RDWR)
        self._node.close()

    def _listen(self) -> None:
        with suppress(OSError, ValueError), self._node.makefile("rb") as lines:
            for line in lines:
                event = json.loads(line)
                if event["round"] != self.place.round:
                    continue
                if event["event"] == "trouble":
                    self.interrupt(event["why"])
                self.asked.set()


_SESSION: ContextVar[Session | None] = ContextVar("zeroshard_session", default=None)


def current_session() -> Session | None:
    """The session of this process; None outside of an elastic job."""
    session = _SESSION.get()
    if session is None and (place := place_in(os.environ)) is not None:
        session = Session(place, stays=False)
        _SESSION.set(session)
    return session


def set_session(session: Session | None) -> None:
    """Set the session of this process."""
    _SESSION.set(session)
