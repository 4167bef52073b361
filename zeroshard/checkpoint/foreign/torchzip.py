"""Opens files of `torch.save` without running code in them.

    | local header, name | padding to 64 | data.pkl | ... | local header, name | padding | data/0 | ...
    | central directory: one record for each entry | [zip64 end record, locator] | end record |

torch writes a plain subset of zip: entries are stored without compression, and the directory describes all bytes. So
this reader refuses everything else: compression, encryption, entries that overlap (by which a few kB can unpack to
petabytes), names that leave the archive, duplicate names, a comment that hides a second directory. Python's `zipfile`
would accept these. The CRC-32 of an entry is compared when it is first read, which torch.load does not; 0 stands for
none (`torch.serialization.set_crc32_options(False)`).

`data.pkl` has the object, whose tensors refer to storages `data/KEY`. `unpickle` reads it; tensors become
`StoredTensor`s.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.foreign.inert import Name, StorageType, shape_of
from zeroshard.checkpoint.foreign.stored import Checksum, FileRange, StoredTensor
from zeroshard.checkpoint.foreign.unpickle import Limits, unpickle
from zeroshard.errors import CheckpointError

_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_RECORD = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_MAX_ENTRIES = 1_000_000
_MAX_NAME = 512


@dataclass(frozen=True)
class Entry:
    """An entry: its name in the archive, the position of its header, and its bytes in the file."""

    name: str
    header: int
    content: FileRange


def load(file: str | os.PathLike[str] | FileRange, limits: Limits | None = None) -> Any:
    """The object in a file of `torch.save`, with its tensors as `StoredTensor`s.

    Args:
        file: a path, or a part of a file that is a whole archive (as in torch.distributed.checkpoint).
        limits: bounds for the pickle; None for the defaults.

    Raises:
        CheckpointError: it is not such a file, is damaged, or malicious; nothing was run.
    """
    archive = file if isinstance(file, FileRange) else _whole(Path(file))
    entries = read_directory(archive)
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise CheckpointError(f"{archive.path}: no file of torch.save: it has {len(pickles)} entries data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    limits = limits or Limits()
    order = entries.get(root + "byteorder")
    if order is not None and (order.content.length > 16 or bytes(order.content.read()) != b"little"):
        raise CheckpointError(f"{archive.path} was written on a machine with another byte order; it can't be read here")
    content = entries[pickles[0]].content
    content.compare()
    if content.length > limits.pickle_bytes:
        raise CheckpointError(f"{archive.path}: its pickle has {content.length} bytes, more than {limits.pickle_bytes}")

    def storage(identifier: Any) -> Storage:
        return _storage(archive.path, root, entries, identifier)

    builders = {
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_v3,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._tensor._rebuild_from_type_v2": _typed,
    }
    return unpickle(bytes(content.read()), str(archive.path), storage, builders, limits)


@dataclass(frozen=True)
class Storage:
    """A storage of the archive, and the dtype of its elements."""

    content: FileRange
    type: StorageType


def _storage(path: Path, root: str, entries: dict[str, Entry], identifier: Any) -> Storage:
    if not (isinstance(identifier, tuple) and len(identifier) == 5 and identifier[0] == "storage"):
        raise CheckpointError("a reference to something that is no storage; refused")
    _, kind, key, _, count = identifier
    if not isinstance(kind, StorageType) or not isinstance(key, str) or type(count) is not int or count < 0:
        raise CheckpointError("a reference to a storage that says nothing sensible about it; refused")
    entry = entries.get(f"{root}data/{key}")
    if entry is None:
        raise CheckpointError(f"{path} is damaged: storage {key!r} is missing")
    if count * kind.dtype.itemsize > entry.content.length:
        raise CheckpointError(f"storage {key!r} has {entry.content.length} bytes, too few for {count} of {kind.dtype}")
    return Storage(entry.content, kind)


def _tensor(args: tuple[Any, ...]) -> StoredTensor:
    if len(args) < 4 or not isinstance(args[0], Storage) or type(args[1]) is not int:
        raise CheckpointError("a tensor that is not made of a storage; refused")
    storage = args[0]
    return StoredTensor(storage.content, storage.type.dtype, shape_of(args[2]), shape_of(args[3]), args[1])


def _tensor_v3(args: tuple[Any, ...]) -> StoredTensor:
    if len(args) < 7 or not isinstance(args[0], Storage) or not isinstance(args[6], torch.dtype):
        raise CheckpointError("a tensor that is not made of a storage; refused")
    return _tensor((Storage(args[0].content, StorageType(args[6])), *args[1:]))


def _parameter(args: tuple[Any, ...]) -> StoredTensor:
    if not args or not isinstance(args[0], StoredTensor):
        raise CheckpointError("a parameter that is no tensor; refused")
    return args[0]


def _typed(args: tuple[Any, ...]) -> Any:
    """A tensor with Python attributes: (function, type, its arguments, attributes)."""
    if len(args) == 4 and isinstance(args[0], Name) and isinstance(args[2], tuple):
        if str(args[0]) == "torch._utils._rebuild_tensor_v2":
            return _tensor(args[2])
        if str(args[0]) == "torch._utils._rebuild_parameter":
            return _parameter(args[2])
    raise CheckpointError("a tensor of a kind that no checkpoint of DeepSpeed or torch holds; refused")


def _whole(path: Path) -> FileRange:
    try:
        if not path.is_file():
            raise CheckpointError(f"there is no file {path}")
        return FileRange(path, 0, path.stat().st_size)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error


def read_directory(archive: FileRange) -> dict[str, Entry]:
    """The entries of an archive by name. Raises CheckpointError for an archive that torch would not write."""
    try:
        return _entries(archive, *_directory(archive))
    except (struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(f"{archive.path} is damaged: {error}") from error


def _bad(archive: FileRange, what: str) -> CheckpointError:
    return CheckpointError(f"{archive.path}: {what}; refused")


def _directory(archive: FileRange) -> tuple[int, int, int]:
    """The start, the size and the number of entries of the central directory."""
    if archive.length < _END.size:
        raise CheckpointError(f"{archive.path} is no file of torch.save, or is cut off ({archive.length} bytes)")
    end_at = archive.length - _END.size
    end = _END.unpack(archive.part(end_at, _END.size).read())
    magic, disk, first_disk, here, entries, size, start, comment = end
    if magic != b"PK\5\6" or comment:
        raise CheckpointError(
            f"{archive.path} is no zip file of torch.save, or is cut off (files of torch before 1.6 must be saved anew)"
        )
    locator_at = max(end_at - _LOCATOR.size, 0)
    locator = _LOCATOR.unpack(archive.part(locator_at, _LOCATOR.size).read())
    if locator[0] == b"PK\6\7":  # torch writes it into small archives too
        at = locator[2]
        end_at = locator_at
        end_at -= _END64.size
        if at != end_at:
            raise _bad(archive, "its zip64 records do not fit together")
        record = _END64.unpack(archive.part(at, _END64.size).read())
        magic, length, _, _, disk, first_disk, here, entries, size, start = record
        if magic != b"PK\6\6" or length != _END64.size - 12:
            raise _bad(archive, "its zip64 records do not fit together")
    if disk or first_disk or here != entries:
        raise _bad(archive, "it is one part of several")
    if start + size != end_at or entries > _MAX_ENTRIES or entries * _RECORD.size > size:
        raise _bad(archive, "its directory is not where it says, or is absurdly large")
    if size > entries * (_RECORD.size + 2 * _MAX_NAME):
        raise _bad(archive, "its directory is absurdly large")
    return start, size, entries


def _entries(archive: FileRange, start: int, size: int, count: int) -> dict[str, Entry]:
    data = memoryview(archive.part(start, size).read())
    found: dict[str, Entry] = {}
    at = 0
    for _ in range(count):
        record = _RECORD.unpack_from(data, at)
        magic, flags, method = record[0], record[3], record[4]
        packed, unpacked, name_size, extra_size, comment_size = record[8], record[9], record[10], record[11], record[12]
        header = record[16]
        if magic != b"PK\1\2" or name_size > _MAX_NAME:
            raise _bad(archive, "a record of its directory is none")
        at += _RECORD.size
        name = bytes(data[at : at + name_size]).decode("utf-8")
        extra = bytes(data[at + name_size : at + name_size + extra_size])
        at += name_size + extra_size + comment_size
        unpacked, packed, header = _zip64(archive, extra, unpacked, packed, header)
        _check_name(archive, name, found)
        if method != 0 or packed != unpacked:
            raise _bad(archive, f"entry {name!r} is compressed, which torch never does: it may be a bomb")
        if flags & 1:
            raise _bad(archive, f"entry {name!r} is encrypted")
        content = _content(archive, name, header, unpacked)
        found[name] = Entry(name, header, replace(content, checksum=Checksum(record[7]) if record[7] else None))
    if at != size:
        raise _bad(archive, "its directory has another size than it says")
    _check_apart(archive, found, start)
    return found


def _zip64(archive: FileRange, extra: bytes, unpacked: int, packed: int, header: int) -> tuple[int, int, int]:
    """The true sizes and offset: those that do not fit into 32 bits are in an extra field."""
    values = [unpacked, packed, header]
    missing = [index for index, value in enumerate(values) if value == 0xFFFFFFFF]
    at = 0
    while missing and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            for place, index in enumerate(missing):
                values[index] = struct.unpack_from("<Q", extra, at + 4 + 8 * place)[0]
            return values[0], values[1], values[2]
        at += 4 + length
    if missing:
        raise _bad(archive, "an entry's size is missing")
    return unpacked, packed, header


def _check_name(archive: FileRange, name: str, found: dict[str, Entry]) -> None:
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or "\0" in name or ":" in parts[0] or ".." in parts:
        raise _bad(archive, f"entry {name!r} has a name that leaves the archive")
    if name in found:
        raise _bad(archive, f"entry {name!r} is there twice")


def _content(archive: FileRange, name: str, header: int, length: int) -> FileRange:
    local = _LOCAL.unpack(archive.part(header, _LOCAL.size).read())
    name_size, extra_size = local[9], local[10]
    if local[0] != b"PK\3\4" or local[3] != 0:
        raise _bad(archive, f"entry {name!r} is not where the directory says, or is compressed there")
    here = archive.part(header + _LOCAL.size, name_size).read()
    if bytes(here) != name.encode():
        raise _bad(archive, f"entry {name!r} has another name at its place ({bytes(here)!r})")
    return archive.part(header + _LOCAL.size + name_size + extra_size, length)


def _check_apart(archive: FileRange, found: dict[str, Entry], directory: int) -> None:
    """Refuse entries that overlap with each other or with the directory."""
    before, before_end = "", 0
    for entry in sorted(found.values(), key=lambda entry: entry.header):
        if entry.header < before_end:
            raise _bad(archive, f"entries {before!r} and {entry.name!r} overlap: it may be a bomb")
        before, before_end = entry.name, entry.content.start - archive.start + entry.content.length
    if before_end > directory:
        raise _bad(archive, f"entry {before!r} reaches into the directory: it may be a bomb")
