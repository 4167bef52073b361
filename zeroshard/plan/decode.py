"""Reads frozen dataclasses back from JSON values, strictly: every field, no other, each of exactly its type.

The field types are the schema, so a new field of the plan needs no code here. Rejected: calling the constructors with
the JSON values; Python checks no types, and a plan with a string for a size would fail much later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from zeroshard.errors import PlanError

T = TypeVar("T")


def decode(kind: type[T], value: object, path: str = "") -> T:
    """The `kind` that the JSON value `value` describes.

    Raises:
        PlanError: it describes none; the message names the place and what is wanted there.
    """
    return _decode(kind, value, path)


def _decode(kind: Any, value: object, path: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _optional(kind, value, path)
    if origin is tuple:
        return _tuple(get_args(kind), value, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind, value, path)
    if is_dataclass(kind):
        return _record(kind, value, path)
    return _scalar(kind, value, path)


def _optional(kind: Any, value: object, path: str) -> Any:
    (inner,) = (option for option in get_args(kind) if option is not NoneType)
    return None if value is None else _decode(inner, value, path)


def _tuple(kinds: Sequence[Any], value: object, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(path, "a list", value)
    if kinds[-1] is not Ellipsis and len(value) != len(kinds):
        raise _wrong(path, f"a list of {len(kinds)}", value)
    inner = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else kinds
    return tuple(
        _decode(kind, item, f"{path}[{index}]") for index, (kind, item) in enumerate(zip(inner, value, strict=True))
    )


def _member(kind: type[Enum], value: object, path: str) -> Enum:
    for member in kind:
        if value == member.value and type(value) is str:
            return member
    raise _wrong(path, "one of " + ", ".join(repr(member.value) for member in kind), value)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _record(kind: Any, value: object, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(path, "an object", value)
    hints, names = _hints(kind), [item.name for item in fields(kind)]
    for name in names:
        if name not in value:
            raise PlanError(f"{path or 'the text'} has no {name!r}")
    for name in value:
        if name not in names:
            raise PlanError(f"{path or 'the text'} has {name!r}, which this version of zeroshard does not know")
    return kind(**{name: _decode(hints[name], value[name], f"{path}.{name}".lstrip(".")) for name in names})


_WANTED = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string"}


def _scalar(kind: type, value: object, path: str) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise _wrong(path, _WANTED[kind], value)
    return value


def _wrong(path: str, wanted: str, value: object) -> PlanError:
    shown = repr(value)
    return PlanError(f"{path or 'the text'} must be {wanted}, not {shown if len(shown) <= 40 else shown[:37] + '...'}")
