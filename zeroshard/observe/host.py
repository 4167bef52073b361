"""What the host does in a step: how long it computes, and how long it waits for what.

    waits    forward   all-gather 12 ms, gc 3 ms        what the main thread waited for, by the part of the step
             between   data 40 ms
    busy     forward   80 ms                            processor time of the main thread outside of waits
    host     queued    2 ms                             ready to run while other threads had the processor
             faults    0                                pages that had to be read from a disk
             disk      9 ms                             other threads waited for state on disk

Each moment belongs to the innermost wait, so that the waits of a part never exceed it. Only the thread that built the
engine is followed; the collector of Python's garbage stops all threads, and counts where it runs on this one. Nothing
is asked of the device. Rejected: a sampling profiler, whose thread would take turns with the one that it watches.
"""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BETWEEN = "between"
"""What lies between the parts: waiting for data, and what the script does."""
GARBAGE, DATA, DISK, UPDATE, LINK = "gc", "data", "disk", "update", "link"
"""Waits that are no collectives: for Python's garbage collector, a loader, a disk, an update on other threads, and
(of a device) for copies from and to host memory."""
OWN_WAITS = frozenset((GARBAGE, DATA, DISK, UPDATE, LINK))
_PAGE = os.sysconf("SC_PAGE_SIZE")
_NANO = 1e-9


@dataclass(frozen=True)
class HostStep:
    """The host's side of one step.

    Attributes:
        waits: seconds by part and by what was waited for.
        busy: seconds of the main thread on a processor by part, outside of waits.
        figures: `queued`, `disk` in seconds, `faults`, and `resident` in bytes; those that this system tells.
    """

    waits: Mapping[str, Mapping[str, float]]
    busy: Mapping[str, float]
    figures: Mapping[str, float]


NOTHING = HostStep({}, {}, {})


class HostTimes:
    """Follows the thread that makes it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._part = BETWEEN
        self._open: list[str] = []
        self._since, self._busy_since = time.perf_counter(), time.thread_time()
        self._waits: dict[str, dict[str, float]] = {}
        self._busy: dict[str, float] = {}
        self._collected, self._collecting = 0.0, 0.0
        self._disk, self._lock = 0.0, threading.Lock()
        self._process = _Process()
        gc.callbacks.append(self._collects)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the step."""
        self._account()
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._account()
            self._part = before

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        """A wait, on any thread; of other threads only those for a disk count, in `figures`."""
        if threading.get_ident() != self._thread:
            begin = time.perf_counter()
            yield
            if kind == DISK:
                with self._lock:
                    self._disk += time.perf_counter() - begin
            return
        self._account()
        self._open.append(kind)
        try:
            yield
        finally:
            self._account()
            self._open.pop()

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; waits for them are waits for data."""
        while True:
            with self.waiting(DATA):
                batch = next(batches, self)
            if batch is self:
                return
            yield batch

    def restart(self) -> None:
        """What came since the last step belongs to none: a step begins here."""
        self._account()
        self._waits.pop(BETWEEN, None)
        self._busy.pop(BETWEEN, None)

    def take(self) -> HostStep:
        """A step is over: what was since the last call."""
        self._account()
        waits, self._waits = self._waits, {}
        busy, self._busy = self._busy, {}
        with self._lock:
            disk, self._disk = self._disk, 0.0
        figures = self._process.since()
        return HostStep(waits, busy, {**figures, "disk": disk} if disk else figures)

    def close(self) -> None:
        """Follow no longer."""
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)
        self._process.close()

    def _account(self) -> None:
        """What passed since the last call belongs to the innermost wait, or to the processor."""
        collected = self._collected  # first: a collection that comes later is left for the next call
        now, busy = time.perf_counter(), time.thread_time()
        self._collected -= collected
        passed = now - self._since - collected
        if self._open:
            self._add(self._open[-1], passed)
        else:
            self._busy[self._part] = self._busy.get(self._part, 0.0) + max(busy - self._busy_since - collected, 0.0)
        self._since, self._busy_since = now, busy

    def _add(self, kind: str, seconds: float) -> None:
        waits = self._waits.setdefault(self._part, {})
        waits[kind] = waits.get(kind, 0.0) + seconds

    def _collects(self, phase: str, _info: Mapping[str, int]) -> None:
        """Called by Python where a collection of garbage begins and ends."""
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting = time.perf_counter()
        elif self._collecting:
            seconds, self._collecting = time.perf_counter() - self._collecting, 0.0
            self._collected += seconds
            self._add(GARBAGE, seconds)


class _Process:
    """What Linux tells of the main thread and the process; nothing on other systems."""

    def __init__(self) -> None:
        self._files = {name: _opened(path) for name, path in _FILES.items()}
        self._queued, self._faults = self._read_queued(), _faults()

    def since(self) -> dict[str, float]:
        """The figures since the last call."""
        found: dict[str, float] = {}
        faults = _faults()
        found["faults"], self._faults = float(faults - self._faults), faults
        queued = self._read_queued()
        if queued is not None and self._queued is not None:
            found["queued"] = (queued - self._queued) * _NANO
        self._queued = queued
        resident = self._numbers("resident")
        if resident is not None:
            found["resident"] = float(resident[1] * _PAGE)
        return found

    def _read_queued(self) -> int | None:
        numbers = self._numbers("queued")
        return None if numbers is None else numbers[1]

    def _numbers(self, name: str) -> list[int] | None:
        file = self._files[name]
        return None if file is None else [int(word) for word in os.pread(file, 256, 0).split()]

    def close(self) -> None:
        for name, file in self._files.items():
            if file is not None:
                os.close(file)
                self._files[name] = None


_FILES = {"queued": Path("/proc/thread-self/schedstat"), "resident": Path("/proc/self/statm")}


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
