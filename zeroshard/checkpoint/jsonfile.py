"""JSON files with a checksum, which are read strictly: one object, no duplicate keys, no NaN, of bounded size.

    {"checksum": CRC-32 of all other values in canonical form, ...}

The checksum is of the values, not of the bytes, so a file that was only reformatted is accepted.
"""

from __future__ import annotations

import json
import math
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from zeroshard.errors import CheckpointError

MAX_BYTES = 1 << 30
_CHECKSUM = "checksum"


def canonical(value: Any) -> str:
    """A value as its only canonical text. Raises ValueError or TypeError for values that JSON lacks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def as_read(value: Any) -> Any:
    """The value as a reader of the file gets it: lists for tuples, text for keys. Raises as `canonical`."""
    return json.loads(json.dumps(value, allow_nan=False))


def encode(content: Mapping[str, Any]) -> bytes:
    """The bytes of a file with this content, which must be a result of `as_read`."""
    checksum = zlib.crc32(canonical(content).encode())
    return json.dumps({_CHECKSUM: checksum, **content}, indent=1, allow_nan=False).encode()


def decode(data: bytes, where: Path) -> dict[str, Any]:
    """The content of a file. Raises CheckpointError, naming the file, if it is damaged."""
    try:
        value = json.loads(
            data, object_pairs_hook=no_duplicate_keys, parse_constant=_no_constant, parse_float=_finite_number
        )
        checksum = value.pop(_CHECKSUM, None) if isinstance(value, dict) else None
        text = canonical(value)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: it is not JSON as zeroshard writes it ({error})") from error
    if checksum is None:
        raise CheckpointError(f"{where} is damaged: it is no JSON object with a checksum")
    if checksum != zlib.crc32(text.encode()):
        raise CheckpointError(f"{where} is damaged: its content does not match its checksum")
    return value


def read_bytes(file: Path, limit: int = MAX_BYTES) -> bytes:
    """All bytes of a plain file. Raises CheckpointError if it is missing, or has more than `limit` bytes."""
    size = plain_size(file)
    if size > limit:
        raise CheckpointError(f"{file} has {size} bytes; more than {limit} are refused")
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error}") from error


def plain_size(file: Path) -> int:
    """The size of a plain file. Raises CheckpointError if it is missing, or something else, such as a pipe."""
    try:
        status = os.stat(file)
    except OSError as error:
        raise CheckpointError(f"{file} is missing or can't be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} is no plain file; refused")
    return status.st_size


def no_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as a hook of the parser. Raises ValueError for a duplicate key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _finite_number(text: str) -> float:
    """Refuse 1e999, which Python reads as infinity, and JSON lacks."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no number that fits in 64 bits")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
