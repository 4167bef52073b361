"""Converts plain Python values to JSON and back without loss.

JSON has no tuples, no keys but text, and no infinity, which schedulers and client states have:

    (1, 2)          {"$tuple": [1, 2]}
    {3: "a"}        {"$dict": [[3, "a"]]}        also for a key that begins with "$"
    float("inf")    {"$float": "inf"}

Other values, such as objects, sets and tensors, are refused with their place. Rejected: pickle, which stores them all,
and runs code at a load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from zeroshard.errors import CheckpointError

_MARK = "$"
_MAX_DEPTH = 100
_MAX_BITS = 10_000
"""Python refuses to convert numbers of more than about 14,000 bits to text."""


def pack(value: Any, where: str, depth: int = 0) -> Any:
    """A value for JSON. Raises CheckpointError, naming the place, for a value that can't be stored."""
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where[:80]}... is nested more than {_MAX_DEPTH} deep (or holds itself)")
    if value is None or type(value) in (bool, int, str):
        if type(value) is int and value.bit_length() > _MAX_BITS:
            raise CheckpointError(f"{where} is a number of {value.bit_length()} bits, more than {_MAX_BITS}")
        return value
    if isinstance(value, float):
        value = float(value)
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, (list, tuple)):
        items = [pack(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith(_MARK) for key in value):
            return {key: pack(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
        keys = [pack(key, f"a key of {where}", depth + 1) for key in value]
        items = [pack(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()]
        return {"$dict": [[key, item] for key, item in zip(keys, items, strict=True)]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which JSON can't hold and no checkpoint keeps; convert it to numbers, "
        "text, lists and dicts (a tensor with tolist())"
    )


def unpack(value: Any) -> Any:
    """The value that `pack` was given. Raises CheckpointError for other input."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    marked = [key for key in value if key.startswith(_MARK)]
    if not marked:
        return {key: unpack(item) for key, item in value.items()}
    content = value[marked[0]]
    try:
        if len(value) == 1 and marked[0] == "$float" and isinstance(content, str):
            return float(content)
        if len(value) == 1 and marked[0] == "$tuple" and isinstance(content, list):
            return tuple(unpack(item) for item in content)
        if len(value) == 1 and marked[0] == "$dict" and isinstance(content, list):
            return {unpack(key): unpack(item) for key, item in content}
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"a value is not what it says: {error}") from error
    raise CheckpointError(f"a value is marked {marked[0][:40]!r}, which has no meaning; refused")


def as_numbers(value: Any) -> Any:
    """The value with tensors of one element and NumPy's scalars, also in containers, replaced by numbers."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, (list, tuple)):
        items = [as_numbers(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: as_numbers(item) for key, item in value.items()}
    return value


def converted_like(saved: Any, own: Any) -> Any:
    """A saved value, converted to the kind of the one it replaces: a tensor (which is filled), a scalar of NumPy."""
    if isinstance(own, torch.Tensor):
        with torch.no_grad():
            return own.fill_(saved)
    if isinstance(own, np.generic):
        return type(own)(saved)
    if isinstance(own, (list, tuple)) and isinstance(saved, (list, tuple)) and len(own) == len(saved):
        return type(saved)(converted_like(one, other) for one, other in zip(saved, own, strict=True))
    return saved


def kind_differences(saved: Any, own: Any, where: str, *, same_length: bool = True) -> Iterator[str]:
    """Sentences for the places at which a saved value is of another kind than the value of this run.

    True and false may replace 1 and 0, None may replace anything but a number, and anything may replace None.
    """
    one, other = _kind(saved), _kind(own)
    if own is None or (saved is None and other != "a number"):
        return
    if one != other and not ({one, other} == {_BOOL, "a number"} and _is_bit(saved) and _is_bit(own)):
        yield f"{where} is {saved!r:.40} there, which is {one}, and {other} in this run"
    elif isinstance(saved, (list, tuple)) and len(saved) == len(own):
        for number, (item, theirs) in enumerate(zip(saved, own, strict=True)):
            yield from kind_differences(item, theirs, f"{where}[{number}]", same_length=same_length)
    elif isinstance(saved, (list, tuple)) and same_length:
        yield f"{where} has {len(saved)} values there, {len(own)} in this run"
    elif isinstance(saved, dict):
        for key in sorted(saved.keys() & own.keys(), key=str):
            yield from kind_differences(saved[key], own[key], f"{where}.{key}", same_length=same_length)


def _is_bit(value: object) -> bool:
    return value in (0, 1)


_BOOL = "true or false"
_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, _BOOL),
    ((int, float), "a number"),
    (str, "text"),
    ((list, tuple), "a list"),
    (dict, "a dict"),
)


def _kind(value: Any) -> str:
    return next((name for kinds, name in _KINDS if isinstance(value, kinds)), type(value).__name__)
