"""A JSON Schema (draft 2020-12) of the config for editors: completion, descriptions, and a line under mistyped keys.

It is made from the key table and the models, as the reference page is. It is kinder than `zeroshard config check`: an
editor can't know the world size, or what the script's arguments say, so bounds between keys are left to the command.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from zeroshard.config.components import OPTIMIZERS, SCHEDULERS, TYPE_ALIASES
from zeroshard.config.keys import ANY_NAME, DTYPES, Key, Node, Status, key_table
from zeroshard.config.models import Section

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {"int": "integer", "number": "number", "str": "string", "list": "array", "dict": "object"}


def json_schema() -> Schema:
    """The schema of a whole config."""
    schema = _section(key_table().root, "")
    for name, components in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        schema["properties"][name] = _component(components)
    return {
        "$schema": DIALECT,
        "title": "zeroshard config",
        "description": "The JSON config of DeepSpeed, as zeroshard reads it.",
        **schema,
    }


def _section(node: Node, path: str) -> Schema:
    properties: Schema = {}
    rest: bool | Schema = False
    for name, child in node.children.items():
        inner = f"{path}.{name}" if path else name
        if name == ANY_NAME:
            rest = _node(child, inner)
        else:
            properties[name] = _node(child, inner)
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": rest}


def _node(node: Node, path: str) -> Schema:
    if node.key is None:
        return _section(node, path)
    if not node.children:
        return _key(node.key, path)
    return {"description": _description(node.key), **_section(node, path)}


def _key(key: Key, path: str) -> Schema:
    inert = [_any_case(value) if isinstance(value, str) else {"const": value} for value in key.inert]
    choices = inert if _must_be_inert(key) else [_kind(kind) for kind in key.kind.split("|")]
    if key.auto not in ("", "value"):
        choices.append(_any_case("auto"))
    schema: Schema = {"description": _description(key), "anyOf": [*choices, {"type": "null"}]}
    if key.default is not None:
        schema["default"] = key.default
    if key.status is Status.DEPRECATED:
        schema["deprecated"] = True
    return schema


def _must_be_inert(key: Key) -> bool:
    return key.status in (Status.INERT_ONLY, Status.REMOVED) and bool(key.inert) and key.path != "data_parallel_size"


def _kind(kind: str) -> Schema:
    if kind.startswith('"'):
        return _any_case(kind.strip('"'))
    if kind == "dtype":
        return {"anyOf": [_any_case(name, prefix="(torch[.])?") for name in DTYPES]}
    if kind == "bool":
        return {"anyOf": [{"type": "boolean"}, {"const": 0}, {"const": 1}]}
    return {"type": _TYPES[kind]} if kind in _TYPES else {}


def _any_case(name: str, prefix: str = "") -> Schema:
    """The name, which editors offer, or the name in other letters: names are read whatever their case."""
    pattern = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else f"[{c}]" for c in name)
    return {"anyOf": [{"const": name}, {"type": "string", "pattern": f"^{prefix}{pattern}$"}]}


def _description(key: Key) -> str:
    if key.status is Status.OBEYED:
        return key.note
    if key.status is Status.DEPRECATED:
        return f"Deprecated: write {key.note}."
    if key.status is Status.ACCEPTED:
        return f"No effect: {key.note}."
    later = "Not built yet" if key.status is Status.INERT_ONLY else "Will not be built"
    return f"{later}: {key.note}."


def _component(models: Mapping[str, type[Section]]) -> Schema:
    names = [*models, *(alias for alias, target in TYPE_ALIASES.items() if target in models)]
    return {
        "type": ["object", "null"],
        "properties": {"type": {"anyOf": [_any_case(name) for name in names]}, "params": {"type": "object"}},
        "required": ["type"],
        "additionalProperties": False,
        "allOf": [
            {
                "if": {"properties": {"type": _any_case(name)}, "required": ["type"]},
                "then": {"properties": {"params": _params(models[TYPE_ALIASES.get(name, name)])}},
            }
            for name in names
        ],
    }


def _params(model: type[Section]) -> Schema:
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    return {
        "type": "object",
        "description": inspect.cleandoc(model.__doc__ or ""),
        "properties": {
            name: {} if field.is_required() else {"default": field.default}
            for name, field in model.model_fields.items()
        },
        "required": required,
        "additionalProperties": False,
    }
