"""`run_log`: a line of JSON for each step of a run, written by rank 0; read again by `explain` and `report`.

    {"zeroshard_run": 1, "ranks": 8, "sent": {...}, "memory": {...}}       a process has begun: what its plan says
    {"step": 1, "samples": 64, "loss": 2.3, ..., "seconds": {"forward": ...}, "whole": ...}
    {"disk": "save", "seconds": 3.2, "after": 1}                           a checkpoint was saved or loaded

A run that goes on adds to the file; a step that is made again counts with its last line. Each line is flushed, so a run
that is killed loses none, and a torn last line is passed by. Rejected: a binary format, which no other tool reads.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from zeroshard.engine.core.handle import Handle
from zeroshard.engine.observing import Disk, StepFacts
from zeroshard.errors import ConfigError, UsageError
from zeroshard.observe.listeners import Silent
from zeroshard.observe.memory import by_kind
from zeroshard.observe.record import StepRecord
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.traffic import traffic_by_axes

_BEGINS = "zeroshard_run"
_VERSION = 1
_LOGGER = logging.getLogger("zeroshard")


class RunLog(Silent):
    """Writes the log; a disk that fails ends the writing and not the training."""

    def __init__(self, handle: Handle, path: str) -> None:
        self._runtime, self._ranks = handle.runtime, handle.comm.ranks
        self._path = Path(path)
        self._step = 0
        self._micro_batches: int | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"run_log.path: {path} can't be written: {error.strerror}") from error

    def report(self, facts: StepFacts, *, due: bool) -> None:
        """After the first step the plan is the one that stays: say what it foretells."""
        self._step = facts.step
        if self._micro_batches is None:
            self._micro_batches = facts.micro_batches
            plan = self._runtime.plan
            sent = traffic_by_axes(plan, micro_batches=facts.micro_batches)
            told = {f"{kind} over {'+'.join(axes)}": nbytes for (kind, axes), (_, nbytes) in sent.items()}
            memory = by_kind(state_bytes(plan))
            self._write({_BEGINS: _VERSION, "ranks": self._ranks, "sent": told, "memory": memory})

    def heard(self, record: StepRecord) -> None:
        """Write a step."""
        self._write({name: _plain(value) for name, value in vars(record).items()})

    def disk(self, what: Disk, seconds: float) -> None:
        """Write that a checkpoint was saved or loaded."""
        self._write({"disk": what, "seconds": seconds, "after": self._step})

    def _write(self, line: dict[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            _LOGGER.warning("run_log.path: %s gets no more lines: %s", self._path, error)
            self._file.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class Run:
    """A log that was read.

    Attributes:
        ranks: of the last process.
        sent, memory: bytes per step and collective, and per kind of state, by its plan.
        steps: in order of their numbers.
        saves: seconds of each save.
    """

    ranks: int
    sent: dict[str, int]
    memory: dict[str, int]
    steps: tuple[StepRecord, ...]
    saves: tuple[float, ...]


def read_run(path: Path) -> Run:
    """Read a log. Raises UsageError for a file that is none."""
    begin: dict[str, Any] = {}
    steps: dict[int, StepRecord] = {}
    saves: list[float] = []
    for line in _lines(path):
        if _BEGINS in line:
            begin = line
        elif "disk" in line:
            saves += [line["seconds"]] if line["disk"] == "save" else []
        elif "step" in line:
            record = _record(line)
            steps[record.step] = record
    if not steps:
        raise UsageError(f'{path}: no step is in it; name the file of "run_log": {{"path": ...}} in the config')
    return Run(
        begin.get("ranks", 1),
        begin.get("sent", {}),
        begin.get("memory", {}),
        tuple(steps[number] for number in sorted(steps)),
        tuple(saves),
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read as the log of a run: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            if number == text.count("\n") + 1:
                return  # torn by the end of the process
            raise UsageError(f"{path}, line {number} is no line of a run's log: {error}") from error
        if not isinstance(found, dict):
            raise UsageError(f"{path}, line {number} is no line of a run's log")
        yield found


def _record(line: dict[str, Any]) -> StepRecord:
    return StepRecord(**{field.name: _number(line.get(field.name)) for field in fields(StepRecord)})


def _plain(value: Any) -> Any:
    """JSON has no inf and no NaN: they are strings here."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
