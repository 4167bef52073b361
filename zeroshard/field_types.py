"""Checks that the fields of frozen values have their declared types; Python checks none.

A plan that is built in Python is then refused as its JSON is (plan.decode): a string for a size, a float for a count or
"skip" for OnNonFinite.SKIP would otherwise fail much later, or be taken for another value. Each class checks its own
fields when it is made, so a value inside of another one is checked once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from zeroshard.errors import PlanError

_Test = Callable[[object], bool]


def check_fields(value: object) -> None:
    """Raises PlanError, with the name of the field, where a field of a dataclass is not of its declared type.

    A whole number counts as a float. Infinity and NaN count as no number, since JSON has neither.
    """
    for name, test, wanted in _tests(type(value)):
        found = getattr(value, name)
        if not test(found):
            raise PlanError(f"{type(value).__name__}: {name} must be {wanted}, not {_shown(found)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


@cache
def _tests(kind: Any) -> tuple[tuple[str, _Test, str], ...]:
    hints = get_type_hints(kind)
    return tuple((item.name, *_test(hints[item.name])) for item in fields(kind))


def _test(kind: Any) -> tuple[_Test, str]:
    """Whether a value is of a type, and the type in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (inner,) = (option for option in arguments if option is not NoneType)
        test, wanted = _test(inner)
        return lambda value: value is None or test(value), f"{wanted} or None"
    if origin is tuple:
        return _tuple_test(arguments)
    if origin is Mapping:
        return _mapping_test(arguments)
    if kind in _SCALARS:
        return _SCALARS[kind]
    assert isinstance(kind, type)
    if issubclass(kind, Enum):
        members = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        return lambda value: isinstance(value, kind), f"one of {members}"
    return lambda value: isinstance(value, kind), f"of class {kind.__name__}"


def _tuple_test(arguments: tuple[Any, ...]) -> tuple[_Test, str]:
    if arguments[-1] is Ellipsis:
        test, wanted = _test(arguments[0])
        return lambda value: _all_of(value, test), f"a tuple with each item {wanted}"
    tests = [_test(argument) for argument in arguments]
    words = ", ".join(wanted for _, wanted in tests)

    def holds(value: object) -> bool:
        return (
            isinstance(value, tuple)
            and len(value) == len(tests)
            and all(test(item) for (test, _), item in zip(tests, value, strict=True))
        )

    return holds, f"a tuple of {words}"


def _all_of(value: object, test: _Test) -> bool:
    return isinstance(value, tuple) and all(test(item) for item in value)


def _mapping_test(arguments: tuple[Any, ...]) -> tuple[_Test, str]:
    (of_key, key), (of_item, item) = map(_test, arguments)

    def holds(value: object) -> bool:
        return isinstance(value, Mapping) and all(of_key(name) and of_item(item) for name, item in value.items())

    return holds, f"a mapping: its keys {key}, its values {item}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


LARGEST = 2**63 - 1
"""Of sizes and counts: torch's own limit."""
_SCALARS: dict[Any, tuple[_Test, str]] = {
    bool: (lambda value: type(value) is bool, "True or False"),
    int: (lambda value: type(value) is int and abs(value) <= LARGEST, "a whole number below 2**63"),
    float: (_is_number, "a finite number"),
    str: (lambda value: type(value) is str, "a string"),
}
