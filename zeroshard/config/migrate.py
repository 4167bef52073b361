"""Rewrites the deprecated keys of a config file, and touches nothing else in it: comments, order and layout stay.

    "cpu_offload": true,  // ten GPUs          "offload_optimizer": {"device": "cpu"},  // ten GPUs

One key is rewritten at a time and the text is read again, so that no rewrite has to know of another's offsets. Printing
the parsed config anew was rejected: it would lose every comment, and the diff would be the whole file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zeroshard.config.entries import VALUE_OF_DEPRECATED
from zeroshard.config.jsontext import JsonReader, Path, Span
from zeroshard.config.keys import Status, key_table
from zeroshard.config.problems import Problems, dotted, show
from zeroshard.errors import ConfigError

OLD_SECTIONS = {"bfloat16": "bf16"}
"""Sections that were renamed whole."""


@dataclass(frozen=True)
class Change:
    """One rewrite: the key and value that were written, and what stands for them now (None: nothing does)."""

    line: int
    old: str
    new: str | None

    def __str__(self) -> str:
        return f"line {self.line}: {self.old} -> {self.new or 'removed'}"


@dataclass(frozen=True)
class Migration:
    """A config's text without deprecated keys, and what was changed for it."""

    text: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class _Edit:
    start: int
    end: int
    text: str


def migrate(text: str, label: str = "JSON text") -> Migration:
    """Rewrite all deprecated keys.

    Args:
        label: what messages call the text, such as the file's name.

    Raises:
        ConfigError: it is not JSON, a deprecated key has no true or false, or contradicts the key that it stands for.
    """
    changes: list[Change] = []
    while True:
        step = _Reading(text, label).next_step()
        if step is None:
            return Migration(text, tuple(changes))
        edits, change = step
        for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        changes.append(change)


class _Reading:
    """One reading of the text."""

    def __init__(self, text: str, label: str) -> None:
        problems = Problems()
        reader = JsonReader(text, label, problems)
        root = reader.read()
        problems.raise_if_any()
        if not isinstance(root, dict):
            raise ConfigError(f"{label}: the config is {show(root)}; it must be an object: {{ ... }}")
        self._root: dict[str, Any] = root
        self._text, self._label = text, label
        self._spans, self._lines = reader.spans, reader.lines

    def next_step(self) -> tuple[list[_Edit], Change] | None:
        """The edits of the first deprecated key, None when there is none left."""
        for old, new in OLD_SECTIONS.items():
            if old in self._root:
                return self._rename_section(old, new)
        for path, target in _deprecated():
            found, value = self._value(path)
            if found:
                return self._replace(path, target, value)
        return None

    def _value(self, path: Path) -> tuple[bool, Any]:
        value: Any = self._root
        for part in path:
            if not isinstance(value, dict) or part not in value:
                return False, None
            value = value[part]
        return True, value

    def _rename_section(self, old: str, new: str) -> tuple[list[_Edit], Change]:
        if new in self._root:
            raise ConfigError(f"{old} ({self._where((old,))}): there is {new} too; move its keys there and remove it")
        span = self._spans[(old,)]
        edit = _Edit(span.key_start, span.key_end, json.dumps(new))
        return [edit], Change(self._lines[(old,)], old, new)

    def _replace(self, path: Path, target: Path, value: Any) -> tuple[list[_Edit], Change]:
        if value is None:
            return [self._removal(path)], Change(self._lines[path], f"{dotted(path)}: null", None)
        if not isinstance(value, bool):
            raise ConfigError(f"{dotted(path)} ({self._where(path)}): must be true or false, not {show(value)}")
        meant = VALUE_OF_DEPRECATED.get(dotted(path), {}).get(value, value)
        change = Change(self._lines[path], f"{dotted(path)}: {show(value)}", f"{dotted(target)}: {show(meant)}")
        present, other = self._value(target)
        if present and other is not None:
            if other != meant:
                raise ConfigError(
                    f"{dotted(path)} ({self._where(path)}): means {dotted(target)} = {show(meant)}, but that is "
                    f"{show(other)} ({self._where(target)}); keep one"
                )
            return [self._removal(path)], change
        return self._written(path, target, meant), change

    def _written(self, path: Path, target: Path, meant: Any) -> list[_Edit]:
        """Write the target: in place of the old key, or into the section that is there already."""
        depth = len(target)
        while depth > 1 and not isinstance(self._value(target[: depth - 1])[1], dict):
            depth -= 1
        rest: Any = meant
        for part in reversed(target[depth:]):
            rest = {part: rest}
        member = f"{json.dumps(target[depth - 1])}: {json.dumps(rest)}"
        if target[:depth] in self._spans:  # it is null, which says as much as its absence
            span = self._spans[target[:depth]]
            return [_Edit(span.key_start, span.value_end, member), self._removal(path)]
        if target[: depth - 1] == path[:-1]:
            span = self._spans[path]
            return [_Edit(span.key_start, span.value_end, member)]
        at = self._spans[target[: depth - 1]].value_start + 1
        more = ", " if self._value(target[: depth - 1])[1] else ""
        return [_Edit(at, at, member + more), self._removal(path)]

    def _removal(self, path: Path) -> _Edit:
        """Take a member out with one comma, and with its line where nothing else stands there."""
        span = self._spans[path]
        start, end = self._with_comma(span)
        line_start = self._text.rfind("\n", 0, span.key_start) + 1
        line_end = self._text.find("\n", end)
        alone = not self._text[line_start : span.key_start].strip() and line_end >= 0
        if alone and start == span.key_start and not self._text[end:line_end].strip():
            return _Edit(line_start, line_end + 1, "")
        blanks = re.match(r"[ \t]*", self._text[end:])
        return _Edit(start, end + (len(blanks.group()) if blanks and start == span.key_start else 0), "")

    def _with_comma(self, span: Span) -> tuple[int, int]:
        if span.comma_after is not None:
            return span.key_start, span.comma_after + 1
        before = span.comma_before
        if before is not None and not self._text[before + 1 : span.key_start].strip():
            return before, span.value_end
        return span.key_start, span.value_end  # a comment stands between: a trailing comma is allowed here

    def _where(self, path: Path) -> str:
        return f"{self._label} line {self._lines[path]}"


def _deprecated() -> Iterator[tuple[Path, Path]]:
    for key in key_table().with_status(Status.DEPRECATED):
        yield tuple(key.path.split(".")), tuple(key.note.split("."))
