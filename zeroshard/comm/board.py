"""The messages that watchdogs exchange through the process group's store, as typed reads and writes.

    <name>/<generation>/process/<rank>     host and process id of each rank, written once
                       /left/<rank>        what a rank had issued when it closed its watchdog
                       /alarm/<n>          alarm n was raised (its value: the rank that judges it)
                       /claim/<n>          counter that elects the judge
                       /answer/<n>/<rank>  what a rank issued and waits for, in answer to alarm n
                       /verdict            the one error that all ranks report
                       /seen               how many ranks have read the verdict

A store client serves one call at a time, so a `Board` belongs to one thread: it works on a clone of the store. Only
`add`, `set`, `get` of an existing key and `check` are used: every store has them and none of them waits for a peer.
The rejected alternative, a collective among the watchdog threads, would hang exactly when it is needed.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from zeroshard.comm.oplog import LogTail


@dataclass(frozen=True)
class ProcessIdentity:
    """A process as other ranks can look it up; `host` tells apart machines and process-id namespaces."""

    host: str
    pid: int

    @staticmethod
    def of_this_process() -> ProcessIdentity:
        """The identity of the calling process."""
        namespace = Path("/proc/self/ns/pid")
        marker = os.readlink(namespace) if namespace.exists() else ""
        return ProcessIdentity(f"{platform.node()} {marker}".strip(), os.getpid())

    def is_alive_here(self) -> bool:
        """True only if the process is known to live: it runs on this host."""
        return self._runs_here() is True

    def is_dead_here(self) -> bool:
        """True only if the process is known to be gone: it ran on this host and the system no longer runs it."""
        return self._runs_here() is False

    def _runs_here(self) -> bool | None:
        if self.host != ProcessIdentity.of_this_process().host:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return True  # no /proc here, or it ended just now: the next look will tell
        return state not in "ZX"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.split()[0]}"


@dataclass(frozen=True)
class Answer:
    """The state that a rank publishes when an alarm is raised, or when it leaves.

    Attributes:
        in_user_collective: the collective of torch.distributed, called by user code, in which its main thread is.
    """

    tail: LogTail
    waiting_for: str | None
    in_user_collective: str | None = None

    def to_text(self) -> str:
        """JSON."""
        fields = {
            "tail": self.tail.to_json(),
            "waiting_for": self.waiting_for,
            "in_user_collective": self.in_user_collective,
        }
        return json.dumps(fields)

    @staticmethod
    def from_text(text: str) -> Answer:
        """The inverse of `to_text`."""
        data = json.loads(text)
        return Answer(LogTail.from_json(data["tail"]), data["waiting_for"], data["in_user_collective"])


@dataclass(frozen=True)
class Verdict:
    """The error that every rank raises: a divergence, or a rank that is gone; `readers` ranks are there to read it."""

    text: str
    diverged: bool
    readers: int


class Board:
    """One thread's view of the shared keys. Every method may raise `RuntimeError` when the store is gone."""

    def __init__(self, store: dist.Store, prefix: str, rank: int) -> None:
        self._rank = rank
        clone: dist.Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (torch's stub lacks it)
        self._store = dist.PrefixStore(prefix, clone)

    def introduce(self) -> None:
        """Publish this rank's process, so that others can see whether it is alive."""
        me = ProcessIdentity.of_this_process()
        self._store.set(f"process/{self._rank}", json.dumps([me.host, me.pid]))

    def process_of(self, rank: int) -> ProcessIdentity | None:
        """The process of a rank, or None if it never got as far as introducing itself."""
        text = self._read(f"process/{rank}")
        if text is None:
            return None
        host, pid = json.loads(text)
        return ProcessIdentity(str(host), int(pid))

    def leave(self, answer: Answer) -> None:
        """Say that this rank issues no more collectives than these."""
        self._store.set(f"left/{self._rank}", answer.to_text())

    def left(self, rank: int) -> Answer | None:
        """What a rank had issued when it left, or None if it is still there."""
        text = self._read(f"left/{rank}")
        return None if text is None else Answer.from_text(text)

    def raise_alarm(self, number: int) -> bool:
        """Raise alarm `number`; true for the one rank that has to judge it."""
        first = self._store.add(f"claim/{number}", 1) == 1
        if first:
            self._store.set(f"alarm/{number}", str(self._rank))
        return first

    def alarm_raised(self, number: int) -> bool:
        """One cheap round trip: the only call made while nothing is wrong."""
        return self._store.check([f"alarm/{number}"])

    def answer(self, number: int | str, answer: Answer) -> None:
        """Publish what this rank issued."""
        self._store.set(f"answer/{number}/{self._rank}", answer.to_text())

    def answer_of(self, number: int | str, rank: int) -> Answer | None:
        """What a rank published, or None if it has not answered yet."""
        text = self._read(f"answer/{number}/{rank}")
        return None if text is None else Answer.from_text(text)

    def decide(self, verdict: Verdict) -> Verdict:
        """Publish a verdict unless there is one already; returns the one that holds."""
        if self._store.add("verdicts", 1) == 1:
            self._store.set("verdict", json.dumps([verdict.text, verdict.diverged, verdict.readers]))
            return verdict
        return self.verdict() or verdict

    def verdict(self) -> Verdict | None:
        """The verdict, if there is one."""
        text = self._read("verdict")
        if text is None:
            return None
        said, diverged, readers = json.loads(text)
        return Verdict(str(said), bool(diverged), int(readers))

    def acknowledge(self) -> None:
        """Say that this rank has read the verdict."""
        self._store.add("seen", 1)

    def acknowledged(self) -> int:
        """How many ranks have read the verdict."""
        return self._store.add("seen", 0)

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None
