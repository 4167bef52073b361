"""Plain Python values as JSON and back without loss.

JSON has no tuples, no keys but text, and no infinity, which schedulers and client states do have:

    (1, 2)          {"$tuple": [1, 2]}
    {3: "a"}        {"$dict": [[3, "a"]]}        also where a key begins with "$"
    float("inf")    {"$float": "inf"}

Nothing else is invented: an object, a set or a tensor is refused with the place where it is. Rejected: pickle, which
would take them all, and run them at the load.
"""

from __future__ import annotations

import math
from typing import Any

from zeroshard.errors import CheckpointError

_MARK = "$"
_MAX_DEPTH = 100


def pack(value: Any, where: str, depth: int = 0) -> Any:
    """A value for JSON. Raises CheckpointError naming the place of what can't be kept."""
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where[:80]}... is nested more than {_MAX_DEPTH} deep (or holds itself)")
    if value is None or type(value) in (bool, int, str):
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
    """The value that `pack` was given. Raises CheckpointError for what `pack` never makes."""
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
