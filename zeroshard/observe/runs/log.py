"""`run_log`: a line of JSON for each step of a run, written by each rank; read again by `explain` and `report`.

    run.jsonl            rank 0
    run.rank-1.jsonl     rank 1, and so on, where `run_log.ranks` is true

    {"zeroshard_run": 1, "ranks": 8, "sent": {...}, "memory": {...}}       a process has begun: what its plan says
    {"step": 1, "samples": 64, "loss": 2.3, ..., "seconds": {"forward": ...}, "whole": ...}
    {"disk": "save", "seconds": 3.2, "after": 1}                           a checkpoint was saved or loaded

A run that goes on adds to the file; a step that is made again counts with its last line. Each line is flushed, so a run
that is killed loses none; one that is torn all the same, by a full disk say, is passed by (`lines`). Rejected: a binary
format, which no other tool reads; to collect the ranks' lines on rank 0, which would need a collective of its own in
each step.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.engine.core.handle import Handle
from zeroshard.engine.observing import Disk, StepFacts
from zeroshard.errors import ConfigError, UsageError, ZeroShardWarning
from zeroshard.observe.listeners import Silent
from zeroshard.observe.memory import by_kind
from zeroshard.observe.record import StepRecord
from zeroshard.observe.runs.lines import BEGINS, begun, read_lines, record_of
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.traffic import traffic_by_axes

_VERSION = 1
_AROUND_LOAD = 12
"""Steps before and after a load that are compared."""
_LOGGER = logging.getLogger("zeroshard")


class RunLog(Silent):
    """Writes the log; a disk that fails ends the writing and not the training."""

    def __init__(self, handle: Handle, path: Path) -> None:
        self._runtime, self._device = handle.runtime, handle.device.type
        self._rank, self._ranks = handle.comm.rank, handle.comm.ranks
        self._path = path
        self._step = 0
        self._micro_batches: int | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer, so that a disk that has failed once does not fail again when the file is closed.
            self._file = self._path.open("ab", buffering=0)
            self._before = b"\n" if self._is_torn() else b""
        except OSError as error:
            raise ConfigError(f"run_log.path: {path} can't be written: {error.strerror}") from error
        self._claim()

    def _claim(self) -> None:
        """Say so where another engine, of this process or another one, writes to the same file."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "another engine writes to it, too, and `zeroshard explain` can't tell their steps apart"
            warnings.warn(
                f"run_log.path: {self._path}: {what}; give each engine a path of its own",
                ZeroShardWarning,
                stacklevel=2,
            )
        except OSError:  # a file system without locks
            return

    def _is_torn(self) -> bool:
        """Whether the last line that an earlier process has written has no end."""
        if not self._path.is_file() or not self._path.stat().st_size:
            return False
        with self._path.open("rb") as earlier:
            earlier.seek(-1, os.SEEK_END)
            return earlier.read() != b"\n"

    def report(self, facts: StepFacts, *, due: bool) -> None:
        """After the first step the plan is the one that stays: say what it foretells."""
        self._step = facts.step
        if self._micro_batches is None:
            self._micro_batches = facts.micro_batches
            plan = self._runtime.plan
            sent = traffic_by_axes(plan, micro_batches=facts.micro_batches)
            told = {f"{kind} over {'+'.join(axes)}": both for (kind, axes), both in sent.items()}
            head = {BEGINS: _VERSION, "rank": self._rank, "ranks": self._ranks, "device": self._device}
            self._write(
                {
                    **head,
                    "sent": {name: nbytes for name, (_, nbytes) in told.items()},
                    "calls": {name: calls for name, (calls, _) in told.items()},
                    "memory": by_kind(state_bytes(plan)),
                }
            )

    def heard(self, record: StepRecord) -> None:
        """Write a step."""
        known = {name: value for name, value in vars(record).items() if value not in ({}, ())}
        if record.device_waits is None:
            del known["device_waits"]
        self._write({name: _plain(value) for name, value in known.items()})

    def disk(self, what: Disk, seconds: float, left_out: Sequence[str]) -> None:
        """Write that a checkpoint was saved or loaded."""
        line = {"disk": what, "seconds": seconds, "after": self._step}
        self._write({**line, "left_out": list(left_out)} if left_out else line)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            left = memoryview(self._before + json.dumps(line).encode() + b"\n")
            self._before = b""
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            _LOGGER.warning("run_log.path: %s gets no more lines: %s", self._path, error)
            self._file.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def rank_path(path: Path, rank: int) -> Path:
    """The file of a rank, given that of rank 0."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


@dataclass(frozen=True)
class Load:
    """A checkpoint that was loaded in a run.

    Attributes:
        left_out: what of it was not loaded.
        before, after: a few steps before and after it, as the file has them.
    """

    left_out: tuple[str, ...]
    before: tuple[StepRecord, ...]
    after: list[StepRecord]


@dataclass(frozen=True)
class Run:
    """A log that was read.

    Attributes:
        ranks: of the last process.
        sent, memory: bytes per step and collective, and per kind of state, by its plan.
        steps: in order of their numbers.
        saves: seconds of each save.
        calls: collectives per step, by its plan.
        loads: the checkpoints that were loaded.
        device: the type of the device; on a CPU, waits of the host are those of the step.
    """

    ranks: int
    sent: dict[str, int]
    memory: dict[str, int]
    steps: tuple[StepRecord, ...]
    saves: tuple[float, ...]
    calls: dict[str, int] = field(default_factory=dict[str, int])
    loads: tuple[Load, ...] = ()
    device: str = "cpu"


def read_run(path: Path) -> Run:
    """Read a log. Raises UsageError for a file that is none."""
    begin: dict[str, Any] = {}
    steps: dict[int, StepRecord] = {}
    saves: list[float] = []
    loads: list[Load] = []
    recent: deque[StepRecord] = deque(maxlen=_AROUND_LOAD)
    for line in read_lines(path):
        if begun(line):
            begin = line
        elif "disk" in line:
            saves += [line["seconds"]] if line["disk"] == "save" else []
            if line["disk"] == "load":
                loads.append(Load(tuple(line.get("left_out", ())), tuple(recent), []))
        elif "step" in line:
            record = record_of(line)
            steps[record.step] = record
            recent.append(record)
            if loads and len(loads[-1].after) < _AROUND_LOAD:
                loads[-1].after.append(record)
    if not steps:
        raise UsageError(f'{path}: no step is in it; name the file of "run_log": {{"path": ...}} in the config')
    return Run(
        begin.get("ranks", 1),
        begin.get("sent", {}),
        begin.get("memory", {}),
        tuple(steps[number] for number in sorted(steps)),
        tuple(saves),
        begin.get("calls", {}),
        tuple(loads),
        begin.get("device", "cpu"),
    )


def read_ranks(path: Path) -> dict[int, Run]:
    """Read the logs of all ranks whose files are there, given that of rank 0; by rank.

    Raises:
        UsageError: one of them is no log.
    """
    first = read_run(path)
    found = {0: first}
    for rank in range(1, first.ranks):
        other = rank_path(path, rank)
        if other.exists():
            found[rank] = read_run(other)
    return found


def _plain(value: Any) -> Any:
    """JSON has no inf and no NaN: they are strings here."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
