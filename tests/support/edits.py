"""Edits of a config document, for tests that mutate valid ones."""

from __future__ import annotations

from typing import Any


def sections_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config and all sections within it."""
    found = [config]
    for value in config.values():
        if isinstance(value, dict):
            found.extend(sections_of(value))
    return found


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set what lies at a dotted path, making the sections on the way; `*` stands for any name."""
    *sections, name = path.replace("*", "lr").split(".")
    for section in sections:
        inner = config.get(section)
        if not isinstance(inner, dict):
            config[section] = inner = {}
        config = inner
    config[name] = value
