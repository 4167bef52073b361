"""The log of the collectives that this rank issued; ranks compare their logs to find and explain a divergence.

    record() ──> entry (one per distinct kind, unit and bytes) ──> ring of the last 4096 entries
                                                             ├──> running 63-bit digest
                                                             └──> calls, for the traffic totals

Ranks agree if and only if their digests and counts agree (up to hash collisions). A digest alone can't say what went
wrong, so the ring keeps the operations themselves. The rejected alternative, hashing the text of each operation when it
is issued, costs several microseconds a call; here a triple is hashed once, when it is first seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

RING_SIZE = 4096
_SLOT = RING_SIZE - 1
_MASK = (1 << 63) - 1
STEP = "step"
"""Kind of the entry that says with which hyper-parameters a step runs; nothing is sent for it."""
PLAN = "plan"
"""Kind of the entry that says by which plan the model was sharded; nothing is sent for it."""
_MULTIPLIER = 6364136223846793005  # Knuth's MMIX linear congruential generator: odd, so the map is a permutation


class Operation(NamedTuple):
    """One collective: its kind ('all-gather'), the unit it serves and its payload in bytes."""

    kind: str
    unit: str
    nbytes: int

    def __str__(self) -> str:
        named = {STEP: "an optimizer step", PLAN: "the start of a sharded model"}
        return named.get(self.kind) or f"{self.kind} of unit {self.unit}"


@dataclass(frozen=True)
class LogTail:
    """The last operations of a rank: `operations[i]` is operation number `first + i`; numbers start at 1.

    `count` operations were issued in all and `digest` covers all of them, also those older than the tail.
    """

    count: int
    digest: int
    first: int
    operations: tuple[Operation, ...]

    def to_json(self) -> dict[str, object]:
        """A compact form: each distinct operation once, then the sequence as indices."""
        index: dict[Operation, int] = {}
        sequence = [index.setdefault(operation, len(index)) for operation in self.operations]
        return {
            "count": self.count,
            "digest": self.digest,
            "first": self.first,
            "distinct": [list(operation) for operation in index],
            "sequence": sequence,
        }

    @staticmethod
    def from_json(data: dict) -> LogTail:
        """The inverse of `to_json`."""
        distinct = [Operation(str(kind), str(unit), int(nbytes)) for kind, unit, nbytes in data["distinct"]]
        operations = tuple(distinct[i] for i in data["sequence"])
        return LogTail(int(data["count"]), int(data["digest"]), int(data["first"]), operations)


class _Entry:
    __slots__ = ("calls", "code", "operation")

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        text = f"{operation.kind}\0{operation.unit}\0{operation.nbytes}"
        # Python's own hash() of a string is salted per process and would differ between ranks.
        self.code = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _MASK
        self.calls = 0


class Recording(NamedTuple):
    """What was issued in a stretch of time, in order; see `OperationLog.recording`."""

    entries: list[_Entry]


class OperationLog:
    """Every collective that this rank issued, in order. One thread writes; any thread may read `tail`."""

    __slots__ = ("_copy", "_count", "_digest", "_entries", "_ring")

    def __init__(self) -> None:
        self._copy: list[_Entry] | None = None
        self._entries: dict[tuple[str, str, int], _Entry] = {}
        self._ring: list[_Entry | None] = [None] * RING_SIZE
        self._digest = 0
        self._count = 0

    def record(self, kind: str, unit: str, nbytes: int) -> None:
        """Append one operation of `nbytes` payload bytes; O(1), under a microsecond once the triple was seen."""
        try:
            entry = self._entries[kind, unit, nbytes]
        except KeyError:
            entry = self._entries[kind, unit, nbytes] = _Entry(Operation(kind, unit, nbytes))
        self._append(entry)

    def record_step(self, table: str) -> None:
        """Append a step and its hyper-parameters, a line per optimizer group, so that ranks compare them too.

        Schedules make a new table in each step, so these entries live only as long as they are in the ring.
        """
        self._append(_Entry(Operation(STEP, table, 0)))

    def record_plan(self, text: str) -> None:
        """Append the plan, a line for each part that ranks must have alike."""
        self._append(_Entry(Operation(PLAN, text, 0)))

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Also keep a list of the operations that are issued inside, to log them again when a graph is replayed."""
        assert self._copy is None, "a recording inside of another"
        self._copy = found = []
        try:
            yield Recording(found)
        finally:
            self._copy = None

    def repeat(self, recording: Recording, table: str) -> int:
        """Append a recording once more, its step with these hyper-parameters; returns the digest at its step."""
        digest = self._digest
        for entry in recording.entries:
            if entry.operation.kind == STEP:
                self.record_step(table)
                digest = self._digest
            else:
                self._append(entry)
        return digest

    def _append(self, entry: _Entry) -> None:
        entry.calls += 1
        if self._copy is not None:
            self._copy.append(entry)
        self._digest = (self._digest * _MULTIPLIER + entry.code) & _MASK
        count = self._count
        # The slot is written before the count, so a reader never counts a slot that is not there yet.
        self._ring[count & _SLOT] = entry
        self._count = count + 1

    @property
    def count(self) -> int:
        """Number of operations issued so far."""
        return self._count

    def digest(self) -> int:
        """63-bit hash of the whole sequence, equal on ranks that issued the same operations in the same order."""
        return self._digest

    def tail(self, n: int = RING_SIZE) -> LogTail:
        """The last `n` operations (at most 4096), oldest first."""
        count, digest = self._count, self._digest
        ring = list(self._ring)
        # The writer may have gone on since: its newest slots replaced our oldest, one of them not counted yet.
        overtaken = self._count + 1 - RING_SIZE if self._count > count else self._count - RING_SIZE
        start = max(0, count - n, overtaken)
        entries = [ring[i & _SLOT] for i in range(start, count)]
        operations = tuple(entry.operation for entry in entries if entry is not None)
        assert len(operations) == count - start, "the ring lost an operation"
        return LogTail(count, digest, start + 1, operations)

    def counts(self) -> dict[Operation, int]:
        """Calls of each distinct operation since the start or the last `reset_totals`."""
        return {entry.operation: entry.calls for entry in list(self._entries.values()) if entry.calls}

    def totals(self) -> dict[str, tuple[int, int]]:
        """Calls and payload bytes per kind since the start or the last `reset_totals`; the traffic a plan predicts."""
        totals: dict[str, tuple[int, int]] = {}
        for entry in list(self._entries.values()):
            if entry.calls:
                calls, nbytes = totals.get(entry.operation.kind, (0, 0))
                totals[entry.operation.kind] = (calls + entry.calls, nbytes + entry.calls * entry.operation.nbytes)
        return totals

    def reset_totals(self) -> None:
        """Start counting traffic anew; sequence, count and digest stay."""
        for entry in list(self._entries.values()):
            entry.calls = 0
