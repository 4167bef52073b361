"""What libraries put into a config before it gets here, made into what the user meant.

    "zero_optimization.reduce_bucket_size": 1e6     a dotted copy (TRL): fills that key where it is absent or "auto"
    "scheduler" without any optimizer               an evaluation by Trainer, which removes the optimizer: left out

A dotted name that is no key of a config stays, and is reported as unknown like every typo.
"""

from __future__ import annotations

import base64
import binascii
import copy
import os
from collections.abc import Mapping
from typing import Any

from zeroshard.config.document import Document, read_document
from zeroshard.config.keys import Key, Node, key_table
from zeroshard.config.problems import Problems


def read(source: Any) -> Document:
    """A config with the lines of its values, from a dict, a path, JSON or HJSON text, or such text in base64.

    A dict stays the same object, so that `engine.config` is the caller's own.

    Raises:
        ConfigError: a file or text that can't be read, with file, line and column.
    """
    if isinstance(source, Mapping):
        return Document(source if isinstance(source, dict) else dict(source), "config")
    problems = Problems()
    document = read_document(_decoded(source) if isinstance(source, str) else source, problems)
    problems.raise_if_any()
    return document


def _decoded(source: str) -> str:
    """The text in a string of base64, which launchers pass for a config; any other string as it is."""
    try:
        text = base64.urlsafe_b64decode(source).decode("utf-8")
    except (binascii.Error, ValueError):  # ValueError: characters or bytes that are no text
        return source
    # A whole config is longer than a path may be, for which Path.exists() raises an error.
    return text if "{" in text and not os.path.exists(source) else source


def understood(raw: Mapping[str, Any], *, optimizer: bool) -> dict[str, Any]:
    """A copy in the words of a user.

    Args:
        optimizer: the call brings an optimizer of its own.
    """
    values: dict[str, Any] = copy.deepcopy(dict(raw))
    for name in [name for name in values if "." in name and _key(name) is not None]:
        key = _key(name)
        *sections, last = name.split(".")
        value, place = values.pop(name), values
        for section in sections:
            place = place.setdefault(section, {})
        if place.get(last, "auto") == "auto":
            # Sizes are made from a model's hidden size there, and are 0.9 times a whole number.
            place[last] = int(value) if key is not None and key.kind == "int" and isinstance(value, float) else value
    if not optimizer and "optimizer" not in values:
        values.pop("scheduler", None)
    return values


def _key(path: str) -> Key | None:
    """The key that a dotted path, or an alias, names."""
    node: Node | None = key_table().root
    for part in path.split("."):
        node = None if node is None else node.children.get(part)
    return None if node is None else node.key
