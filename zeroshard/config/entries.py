"""From a nested document to flat entries by canonical path: unknown keys, aliases, deprecated keys and overrides.

After this step every entry belongs to a row of the key table, `"auto"` may still be a value, and nothing has been
interpreted yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zeroshard.config.document import Document, plain_object
from zeroshard.config.keys import Key, KeyTable, Node, Status
from zeroshard.config.problems import Problems, dotted, show
from zeroshard.config.suggest import advice

AUTO = "auto"
OVERRIDE = "override"

_OFFLOAD_DEVICE = {True: "cpu", False: "none"}
VALUE_OF_DEPRECATED: dict[str, Mapping[Any, Any]] = {
    "zero_optimization.cpu_offload": _OFFLOAD_DEVICE,
    "zero_optimization.cpu_offload_param": _OFFLOAD_DEVICE,
}
_SECTION_EXAMPLES = {
    "zero_optimization": '{"stage": 3}',
    "bf16": '{"enabled": true}',
    "fp16": '{"enabled": true}',
    "optimizer": '{"type": "AdamW", "params": {"lr": 1e-4}}',
    "scheduler": '{"type": "WarmupLR", "params": {}}',
}


@dataclass(frozen=True)
class Entry:
    """A value that somebody gave for a known key."""

    path: str
    key: Key
    value: Any
    origin: str

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def is_auto(self) -> bool:
        return isinstance(self.value, str) and self.value.lower() == AUTO and self.key.auto != "value"


Entries = dict[str, Entry]


def gather_entries(
    document: Document, overrides: Mapping[str, Any] | None, table: KeyTable, problems: Problems
) -> Entries:
    """All entries of a document and the caller's overrides, by canonical path.

    A null counts as absent, but for parameters of the optimizer and the scheduler.
    """
    entries = _Walk(document, table, problems).entries
    if overrides:
        extra = Document(_nest(overrides, problems), OVERRIDE)
        _merge(entries, _Walk(extra, table, problems).entries, problems)
    return _replace_deprecated(entries, table, problems)


class _Walk:
    """One walk over a document along the tree of known keys."""

    def __init__(self, document: Document, table: KeyTable, problems: Problems) -> None:
        self._document = document
        self._table = table
        self._problems = problems
        self.entries: Entries = {}
        self._section(document.root, table.root, ())

    def _section(self, values: Mapping[str, Any], node: Node, parts: tuple[str, ...]) -> None:
        for name, value in values.items():
            here = (*parts, name)
            child = node.child(name)
            if child is None:
                # Looking for similar names takes milliseconds each.
                what = "unknown key" if self._problems.full else f"unknown key; {self._advice(parts, name)}"
                self._problems.add(dotted(here), self._document.origin(here), what)
            elif value is not None or _is_parameter(child):
                self._known(value, child, here)

    def _advice(self, parts: tuple[str, ...], name: str) -> str:
        return advice(self._table, dotted(parts), name)

    def _known(self, value: Any, node: Node, parts: tuple[str, ...]) -> None:
        if node.key is not None:
            self._add(node.key, value, parts)
        if not node.children:
            return
        if isinstance(value, dict):
            self._section(value, node, parts)
        elif node.key is None:
            path = dotted(parts)
            example = _SECTION_EXAMPLES.get(path, "{ ... }")
            what = f"must be an object such as {example}, not {show(value)}"
            self._problems.add(path, self._document.origin(parts), what)

    def _add(self, key: Key, value: Any, parts: tuple[str, ...]) -> None:
        written = dotted(parts)
        origin = self._document.origin(parts)
        path = written if "*" in key.path else key.path
        if written in key.aliases:
            origin = (
                f"{origin} as {written.rsplit('.', 1)[-1] if written.rpartition('.')[0] == key.section else written}"
            )
        if key.kind == "bool" and isinstance(value, int | float) and value in (0, 1):
            value = bool(value)
        earlier = self.entries.get(path)
        if earlier is not None and earlier.value != value:
            what = f"given twice under two names: {show(earlier.value)} ({earlier.origin}) and {show(value)}; keep one"
            self._problems.add(path, origin, what)
        self.entries[path] = Entry(path, key, value, origin)


def _is_parameter(node: Node) -> bool:
    """Whether a null is a value: parameters are handed to the optimizer or schedule as they are."""
    return node.key is not None and node.key.path.endswith("params.*")


def _nest(overrides: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Overrides may be nested like a config or keyed by dotted path."""
    root: dict[str, Any] = {}
    for path, value in plain_object(overrides, OVERRIDE, problems).items():
        *sections, name = path.split(".")
        place: Any = root
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place, dict) else None
        if isinstance(place, dict) and isinstance(place.get(name), dict) and isinstance(value, dict):
            place[name].update(value)
        elif isinstance(place, dict) and name not in place:
            place[name] = value
        else:
            problems.add(path, OVERRIDE, "contradicts another override; give each key once")
    return root


def _merge(entries: Entries, overrides: Entries, problems: Problems) -> None:
    """Overrides fill what is absent or "auto". A different value written in the config is a contradiction."""
    for path, override in overrides.items():
        written = entries.get(path)
        if override.is_auto:
            continue
        if written is None or written.is_auto or written.value == override.value:
            entries[path] = override if written is None or written.is_auto else written
        elif not isinstance(written.value, dict):
            what = (
                f"the config says {show(written.value)} but the script's arguments say {show(override.value)}; "
                f'make them equal, or write "auto" in the config'
            )
            problems.add(path, written.origin, what)


def _replace_deprecated(entries: Entries, table: KeyTable, problems: Problems) -> Entries:
    result = {path: entry for path, entry in entries.items() if entry.key.status is not Status.DEPRECATED}
    for path, entry in entries.items():
        if entry.key.status is not Status.DEPRECATED:
            continue
        target = table.keys[entry.key.note]
        if not isinstance(entry.value, bool):
            problems.add(path, entry.origin, f"must be true or false, not {show(entry.value)}")
            continue
        value = VALUE_OF_DEPRECATED.get(path, {}).get(entry.value, entry.value)
        moved = replace(
            entry, path=target.path, key=target, value=value, origin=f"{entry.origin}, deprecated alias {entry.name}"
        )
        present = result.get(target.path)
        if present is not None and present.value != value:
            what = (
                f"means {target.path} = {show(value)}, but that is {show(present.value)} ({present.origin}); keep one"
            )
            problems.add(path, entry.origin, what)
        result.setdefault(target.path, moved)
        problems.warn(f"{path} ({entry.origin}) is deprecated; write {target.path}: {show(value)}")
    return result
