"""A config as it was given, from a dict, a file, JSON or HJSON text: plain values, each with its origin.

`Document.origin(path)` answers "where did this come from" for every later message: `ds.json line 12`, `config` for a
dict, `override` for what the caller's arguments say.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.bounded import read_bounded
from zeroshard.config.jsontext import MAX_DEPTH, JsonReader
from zeroshard.config.problems import Problems, dotted, show
from zeroshard.errors import ConfigError

_MAX_INT_BITS = 128


@dataclass(frozen=True)
class Document:
    """Plain JSON values and where each was written."""

    root: dict[str, Any]
    label: str
    lines: Mapping[tuple[str | int, ...], int] = field(default_factory=dict)

    def origin(self, path: tuple[str | int, ...]) -> str:
        line = self.lines.get(path)
        return self.label if line is None else f"{self.label} line {line}"


Source = Mapping[str, Any] | str | os.PathLike[str] | Document


def read_document(source: Source, problems: Problems) -> Document:
    """Read a config. Raises `ConfigError` when it can't be read at all; lesser things go to `problems`."""
    if isinstance(source, Document):
        return source
    if isinstance(source, Mapping):
        return Document(plain_object(source, "config", problems), "config")
    if isinstance(source, str) and _is_json_text(source):
        return _parse(source, "JSON text", problems)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        return _parse(file_text(path), path.name, problems)
    raise ConfigError(
        f"the config is a {type(source).__name__}; give a dict, the path of a JSON file, or JSON text",
    )


def _is_json_text(source: str) -> bool:
    return "{" in source or "\n" in source or not source.strip()


def file_text(path: Path) -> str:
    """The text of a config file, byte for byte but for its encoding. Raises `ConfigError` when it can't be read."""
    try:
        return read_bounded(path).decode("utf-8")  # a byte order mark is blank to the reader; line ends are kept
    except UnicodeDecodeError as error:
        raise ConfigError(f"{show(str(path))} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"the config file {show(str(path))} can't be read: {reason}; check the path") from error


def _parse(text: str, label: str, problems: Problems) -> Document:
    reader = JsonReader(text, label, problems)
    root = reader.read()
    if not isinstance(root, dict):
        raise ConfigError(f"{label}: the config is {show(root)}; it must be an object: {{ ... }}")
    return Document(root, label, reader.lines)


def plain_object(source: Mapping[str, Any], origin: str, problems: Problems) -> dict[str, Any]:
    """A dict of plain JSON values from a mapping of Python values; what has no JSON counterpart becomes a problem."""
    return _plain(source, (), origin, problems)


def _plain(value: Any, path: tuple[str | int, ...], origin: str, problems: Problems) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if len(path) > MAX_DEPTH:
        problems.add(dotted(path[:3]) + "...", origin, f"nested deeper than {MAX_DEPTH}; no setting lies so deep")
        return None
    if isinstance(value, Mapping):
        result: dict[str, Any] = {}
        for name, item in value.items():
            if isinstance(name, str):
                result[name] = _plain(item, (*path, name), origin, problems)
            else:
                problems.add(dotted(path), origin, f"a key is of type {type(name).__name__}; keys must be strings")
        return result
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, index), origin, problems) for index, item in enumerate(value)]
    if isinstance(value, numbers.Real):
        return _plain_number(value, path, origin, problems)
    if isinstance(value, os.PathLike):
        return str(value)
    what = f"a {type(value).__name__} has no counterpart in JSON; write a string, a number or true/false"
    problems.add(dotted(path), origin, what)
    return None


def _plain_number(value: numbers.Real, path: tuple[str | int, ...], origin: str, problems: Problems) -> Any:
    if not isinstance(value, numbers.Integral):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isnan(number):
            return number
        problems.add(dotted(path), origin, "is NaN; no setting is NaN, write a number")
        return None
    elif int(value).bit_length() <= _MAX_INT_BITS:
        return int(value)
    problems.add(dotted(path), origin, "the number is too large; no setting needs so many digits")
    return None
