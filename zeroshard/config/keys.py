"""The table of every known key, read from `keys.tsv`.

One row is one JSON path: its kind and default, what zeroshard does with it today, and why. The table is data so that
the checks, `zeroshard config explain` and the reference page can't disagree. `*` in a path stands for any name.
Rejected: a pydantic model for every section, which would be four hundred fields that no code reads.
"""

from __future__ import annotations

import csv
import enum
import functools
import importlib.resources
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ANY_NAME = "*"


class Status(enum.Enum):
    """What zeroshard does with a key."""

    OBEYED = "obeyed"
    INERT_ONLY = "inert_only"
    """Not built yet: accepted at a value that asks for nothing, refused by name at any other."""
    ACCEPTED = "accepted"
    """Has no effect, for a reason that the row gives."""
    REMOVED = "removed"
    """Will not be built: refused unless it is switched off."""
    DEPRECATED = "deprecated"
    """Stands for another key, which the row names."""


@dataclass(frozen=True)
class Key:
    """One row of the table."""

    path: str
    kind: str
    default: Any
    status: Status
    inert: tuple[Any, ...]
    auto: str
    """How `"auto"` is resolved without an override: `default`, `derived`, `precision`; `value` means it is a value."""
    aliases: tuple[str, ...]
    note: str

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]


@dataclass
class Node:
    """A place in the tree of known paths: a section, a key, or both."""

    children: dict[str, Node] = field(default_factory=dict)
    key: Key | None = None

    def child(self, name: str) -> Node | None:
        return self.children.get(name) or self.children.get(ANY_NAME)


@dataclass(frozen=True)
class KeyTable:
    """All known keys by path, and the tree that a document is walked along."""

    keys: Mapping[str, Key]
    root: Node

    def with_status(self, status: Status) -> Iterator[Key]:
        return (key for key in self.keys.values() if key.status is status)


def _row(fields: Mapping[str, str]) -> Key:
    return Key(
        path=fields["key"],
        kind=fields["kind"],
        default=json.loads(fields["default"]),
        status=Status(fields["status"]),
        inert=tuple(json.loads(fields["inert"])) if fields["inert"] else (),
        auto=fields["auto"],
        aliases=tuple(fields["aliases"].split(",")) if fields["aliases"] else (),
        note=fields["note"],
    )


@functools.cache
def key_table() -> KeyTable:
    """The table of this release; read once."""
    text = importlib.resources.files("zeroshard.config").joinpath("keys.tsv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    keys = {key.path: key for key in map(_row, rows)}
    root = Node()
    for key in keys.values():
        for path in (key.path, *key.aliases):
            node = root
            for name in path.split("."):
                node = node.children.setdefault(name, Node())
            node.key = key
    return KeyTable(keys, root)


def kind_matches(kind: str, value: Any) -> bool:
    """Whether a value is of a kind of the table: alternatives joined by `|`, each a name or a quoted literal."""
    return any(_alternative_matches(alternative, value) for alternative in kind.split("|"))


DTYPES = ("fp32", "float32", "float", "fp16", "float16", "half", "bf16", "bfloat16", "int8")


def _alternative_matches(alternative: str, value: Any) -> bool:
    if alternative.startswith('"'):
        return isinstance(value, str) and value.lower() == alternative.strip('"').lower()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    checks = {
        "any": True,
        "bool": isinstance(value, bool),
        "int": number and value == value and abs(value) != float("inf") and value == int(value),
        "number": number,
        "str": isinstance(value, str),
        "list": isinstance(value, list),
        "dict": isinstance(value, dict),
        "section": isinstance(value, dict),
        "dtype": isinstance(value, str) and value.removeprefix("torch.").lower() in DTYPES,
    }
    return checks[alternative]


def kind_in_words(kind: str) -> str:
    """A kind as an error message says it."""
    words = {
        "bool": "true or false",
        "int": "a whole number",
        "number": "a number",
        "str": "a string",
        "list": "a list",
        "dict": "an object",
        "section": "an object",
        "dtype": '"fp32", "fp16" or "bf16"',
        "any": "any value",
    }
    return " or ".join(words.get(alternative, alternative) for alternative in kind.split("|"))
