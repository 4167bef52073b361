"""The lines of a run's log, read back one by one: what each is, and an error that names the line where it is nothing.

A line that a kill or a full disk has torn is passed by: the last one without a word, others, behind which a run has
gone on, with a warning.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zeroshard.errors import UsageError
from zeroshard.observe.record import StepRecord

BEGINS = "zeroshard_run"
"""Key of the line that a process begins with."""
_LOGGER = logging.getLogger("zeroshard")
_Test = Callable[[object], bool]


def begun(value: object) -> bool:
    """Whether a line says that a process has begun."""
    return isinstance(value, dict) and BEGINS in value


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Each line of a file.

    Raises:
        UsageError: the file can't be read, or a line is neither torn nor one of a log.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read as the log of a run: {error}") from error
    lines = text.split("\n")
    read = [_decoded(line) for line in lines]
    for number, found in enumerate(read, 1):
        where = f"{path}, line {number}"
        if isinstance(found, json.JSONDecodeError):
            if number == len(read):
                continue  # what ends in a newline has an empty last line
            if lines[number - 1].startswith('{"'):
                _LOGGER.warning("%s is torn; it is passed by", where)
                continue
            raise UsageError(f"{where} is no line of a run's log: {found}") from found
        if not isinstance(found, dict):
            raise UsageError(f"{where} is no line of a run's log")
        check(found, where)
        yield found


def _decoded(line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return error


def check(line: Mapping[str, Any], where: str) -> None:
    """Raises UsageError for a field of a line that is of another type than a run writes, or that is missing."""
    kind = next((one for one in (BEGINS, "disk", "step") if one in line), None)
    if kind is None:
        return  # of a later version
    for name in _NEEDED[kind]:
        if name not in line:
            raise UsageError(f"{where} is no line of a run's log: {name} is missing")
    for name, value in line.items():
        test = _FIELDS[kind].get(name)
        if test is not None and not test(value):
            raise UsageError(f"{where} is no line of a run's log: {name} can't be {value!r}")


def record_of(line: Mapping[str, Any]) -> StepRecord:
    """The step of a line that was checked."""
    return StepRecord(**{"rates": (), "seconds": {}, **{name: _number(line[name]) for name in _STEP if name in line}})


def _number(value: Any) -> Any:
    """JSON has no inf and no NaN: they are strings in the file."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def _is_whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_number(value: object) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool)) or value in ("nan", "inf", "-inf")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _maybe(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _listed(test: _Test) -> _Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _by_name(test: _Test) -> _Test:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


_STEP: Mapping[str, _Test] = {
    "step": _is_whole,
    "samples": _is_whole,
    "batch": _is_whole,
    "tokens": _maybe(_is_whole),
    "loss": _maybe(_is_number),
    "norm": _maybe(_is_number),
    "applied": _is_truth,
    "skipped": _is_whole,
    "rates": _listed(_is_number),
    "scale": _maybe(_is_number),
    "seconds": _by_name(_is_seconds),
    "whole": _maybe(_is_seconds),
    "ended": _is_seconds,
    "nonfinite": _maybe(_is_text),
    "waits": _by_name(_by_name(_is_seconds)),
    "busy": _by_name(_is_seconds),
    "host": _by_name(_is_number),
    "device_waits": _maybe(_by_name(_by_name(_is_seconds))),
}
_FIELDS: Mapping[str, Mapping[str, _Test]] = {
    "step": _STEP,
    "disk": {"disk": _is_text, "seconds": _is_seconds, "after": _is_whole, "left_out": _listed(_is_text)},
    BEGINS: {
        "ranks": lambda value: _is_whole(value) and value != 0,
        "sent": _by_name(_is_whole),
        "calls": _by_name(_is_whole),
        "memory": _by_name(_is_whole),
        "device": _is_text,
    },
}
_EMPTY = ("rates", "seconds", "nonfinite", "waits", "busy", "host", "device_waits")
"""What a step's line may lack: nothing is known of it."""
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "step": tuple(name for name in _STEP if name not in _EMPTY),
    "disk": ("seconds",),
    BEGINS: (),
}
