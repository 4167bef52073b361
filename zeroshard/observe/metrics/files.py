"""The numbers of one rank in one small JSON file, replaced as a whole; and all files of a node read back.

    /tmp/zeroshard-metrics-UID/rank-PID-N.json        of the N-th engine in that process

A file whose process has ended is removed by whoever reads. Rejected: to ask each rank over a socket; one that hangs
would hold up the answer for all others, and that is when somebody looks.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.errors import ConfigError

_PREFIX, _SUFFIX = "rank-", ".json"


@dataclass(frozen=True)
class Histogram:
    """Observations by upper bounds; `counts` are of each bucket alone, the last one of what is above all bounds."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


@dataclass(frozen=True)
class Sample:
    """A value of a metric with its own labels, or a histogram."""

    name: str
    labels: dict[str, str]
    value: float | Histogram


@dataclass(frozen=True)
class RankSamples:
    """What one rank says."""

    run: str
    rank: int
    samples: tuple[Sample, ...]


def open_directory(path: str | None) -> Path:
    """The folder of this node's files, which nobody else may write. Raises ConfigError where that can't be."""
    owner = os.getuid()
    folder = Path(path) if path is not None else Path(tempfile.gettempdir()) / f"zeroshard-metrics-{owner}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        belongs = folder.stat().st_uid
    except OSError as error:
        raise ConfigError(f"metrics.directory: {folder} can't be made: {error.strerror}") from error
    if belongs != owner:
        raise ConfigError(f"metrics.directory: {folder} belongs to user {belongs}; name a folder of your own")
    return folder


def claim(folder: Path) -> tuple[Path, int]:
    """A file for one engine of this process, still empty, and its number among them. Raises OSError."""
    for number in itertools.count(1):
        path = folder / f"{_PREFIX}{os.getpid()}-{number}{_SUFFIX}"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path, number
    raise AssertionError("unreachable")


def write_samples(path: Path, said: RankSamples) -> None:
    """Replace a file that was claimed."""
    samples = [[sample.name, sample.labels, _plain(sample.value)] for sample in said.samples]
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"run": said.run, "rank": said.rank, "samples": samples}), encoding="utf-8")
    draft.replace(path)


def read_all(folder: Path) -> Iterator[RankSamples]:
    """What the ranks of this node say whose processes are there."""
    for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not pid.isdigit() or not _lives(int(pid)):
            path.unlink(missing_ok=True)
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:  # it has just ended
            continue
        if not text:  # it has just begun
            continue
        told = json.loads(text)
        samples = tuple(Sample(name, labels, _value(value)) for name, labels, value in told["samples"])
        yield RankSamples(told["run"], told["rank"], samples)


def _plain(value: float | Histogram) -> Any:
    return [value.bounds, value.counts, value.total] if isinstance(value, Histogram) else value


def _value(plain: Any) -> float | Histogram:
    return Histogram(*plain) if isinstance(plain, list) else float(plain)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
