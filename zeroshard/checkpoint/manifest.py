"""The table of a checkpoint, `checkpoint.json`: all tensors, the places of their bytes, and checksums.

    DIR/latest                             name of the newest complete checkpoint
    DIR/TAG/checkpoint.json                this table, with all state that is no tensor
    DIR/TAG/model-00003-0.safetensors      rank 3's parts of parameters and buffers
    DIR/TAG/optimizer-00003-0.safetensors  rank 3's parts of the optimizer's state
                          |- a tensor is at most once in a file, so the second rectangle of a part is in ...-1

    checkpoint.json   version, order (of saves into the directory), world_size
                      files {name: bytes, crc32 of the header}
                      tensors {name: kind, dtype, shape, parts [file, begin, offsets, sizes, crc32 per block]}
                      aliases {other name of a tied parameter: its name}
                      state   counters, hyper-parameters, scheduler, loss scale, client state, ...
                      ranks   [what each rank keeps for itself: random number generators, ...]

Names: a parameter or buffer has its name in the model; `state.NAME.KEY` is optimizer state KEY of parameter NAME, as
torch's flattened optimizer state dicts have it; `rank.R.NAME` is a buffer whose value on rank R was not that of rank 0.
A parameter that has a float32 master weight is stored as that. The files are safetensors with the sharding information
of torch.distributed.checkpoint in their metadata, so its HuggingFaceStorageReader reads them without this table.

A checkpoint may come from an untrusted source, so names, sizes and places are checked before anything is opened or
allocated. Rejected: checksums inside of the safetensors files, which would have to be known before the data is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import jsonfile
from zeroshard.checkpoint.dtypes import dtype_of, name_of
from zeroshard.checkpoint.encryption import Encryption, open_encryption
from zeroshard.checkpoint.keys import KeyService
from zeroshard.checkpoint.slices import flat_start, rectangles
from zeroshard.errors import CheckpointError

MANIFEST = "checkpoint.json"
FORMAT = "zeroshard checkpoint"
VERSION = 1
ENCRYPTED_VERSION = 2
"""The version of encrypted checkpoints; see `encryption`."""
BLOCK = 4 << 20
"""Bytes with one checksum, counted from the beginning of each part; the last block may be shorter."""
MAX_NAME = 1024
_MAX_SIZE = 1 << 62
MAX_ORDER = _MAX_SIZE
_FILE = re.compile(r"(model|optimizer)-[0-9]{5,9}-[0-9]{1,3}\.safetensors")
OWN_FILE = re.compile(rf"{_FILE.pattern}|rank-[0-9]{{5,9}}\.json")
"""Names of the files in a checkpoint's folder besides the table; rank tables are there only during a save."""


class TensorKind(str, Enum):
    """Kinds of tensors in a checkpoint."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    RANK_BUFFER = "rank_buffer"
    """A buffer's value on one rank, if it was not that of rank 0."""
    OPTIMIZER = "optimizer"
    """Optimizer state with an element for each of the parameter's."""
    OPTIMIZER_SCALAR = "optimizer_scalar"
    """Optimizer state with one value for the whole parameter."""
    OPTIMIZER_NUMBER = "optimizer_number"
    """The same for an optimizer that keeps a Python number instead of a tensor: bool, int64 or float64."""
    RANK_OPTIMIZER = "rank_optimizer"
    """Optimizer state that can be loaded by the same rank of equally many ranks only."""

    @property
    def of_optimizer(self) -> bool:
        return self in (TensorKind.OPTIMIZER, TensorKind.OPTIMIZER_SCALAR, TensorKind.OPTIMIZER_NUMBER)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's description.

    Attributes:
        dtype: the dtype in which it is stored.
        compute: for parameters, the dtype that the forward used.
        trainable: for parameters, whether they require gradients.
        of, key: for optimizer state, the parameter and the state's name.
    """

    name: str
    kind: TensorKind
    dtype: torch.dtype
    shape: tuple[int, ...]
    compute: torch.dtype | None = None
    trainable: bool = True
    of: str = ""
    key: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """Flat elements [start, stop) of a tensor, which are one rectangle of it, in a file.

    Attributes:
        begin: the first byte of them in the file.
        offsets, sizes: the rectangle, by dim.
        checksums: CRC-32 of each BLOCK bytes.
    """

    file: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class FileInfo:
    """A safetensors file: its size, and the CRC-32 of its header with the eight bytes before it.

    Attributes:
        digest: SHA-256 of the file as it is on disk, for a signature; "" if it was not computed. No table has it.
    """

    nbytes: int
    header_checksum: int
    digest: str = ""


@dataclass(frozen=True)
class Manifest:
    """The content of `checkpoint.json`; see the module's docstring. `parts` of a tensor are in the order of elements.

    Attributes:
        order: grows with each save into a directory; 0 if it is not known.
        encryption: the encryption of table and files; None if they are not encrypted.
    """

    world_size: int
    files: Mapping[str, FileInfo]
    tensors: Mapping[str, TensorInfo]
    parts: Mapping[str, tuple[Part, ...]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[Mapping[str, Any], ...] = ()
    order: int = 0
    encryption: Encryption | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def encode(self) -> bytes:
        """The bytes of `checkpoint.json`."""
        tensors = {
            name: {**_info_out(info), "parts": [part_out(part) for part in self.parts[name]]}
            for name, info in self.tensors.items()
        }
        files = {
            name: {"bytes": info.nbytes, "header_crc32": info.header_checksum} for name, info in self.files.items()
        }
        content = {
            "order": self.order,
            "world_size": self.world_size,
            "files": files,
            "tensors": tensors,
            "aliases": dict(self.aliases),
            "state": self.state,
            "ranks": list(self.ranks),
        }
        if self.encryption is not None:
            return encode_encrypted(self.order, self.encryption, self.encryption.encrypt_table(MANIFEST, content))
        return jsonfile.encode({"format": FORMAT, "version": VERSION, **content})


def encode_encrypted(order: int, encryption: Encryption, table: str) -> bytes:
    """The bytes of `checkpoint.json` whose table is encrypted."""
    head = {
        "format": FORMAT,
        "version": ENCRYPTED_VERSION,
        "order": order,
    }  # `directory` reads the order from the first bytes
    return jsonfile.encode({**head, "encryption": encryption.header(), "sealed": table})


def read_content(folder: Path) -> dict[str, Any]:
    """The content of a `checkpoint.json`, encrypted or not. Raises CheckpointError if it is not zeroshard's."""
    where = folder / MANIFEST
    content = jsonfile.decode(jsonfile.read_bytes(where), where)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not the table of a zeroshard checkpoint")
    if content.get("version") not in (VERSION, ENCRYPTED_VERSION):
        raise CheckpointError(
            f"{where} has version {content.get('version')} of the format; this zeroshard reads {VERSION} and "
            f"{ENCRYPTED_VERSION}"
        )
    return content


def read_manifest(folder: Path, service: KeyService | None = None) -> Manifest:
    """The manifest of a checkpoint.

    Args:
        service: has the key of an encrypted checkpoint.

    Raises:
        CheckpointError: the table is missing or invalid; the message names file and tensor.
    """
    where, encryption = folder / MANIFEST, None
    content = read_content(folder)
    if content["version"] == ENCRYPTED_VERSION:
        encryption = open_encryption(content.get("encryption"), service, where)
        order, content = content.get("order"), encryption.decrypt_table(MANIFEST, content.get("sealed"), where)
        if content.get("order") != order:
            raise CheckpointError(f"{where} was changed: its place in the order of saves is not the encrypted one")
    try:
        return _decode(content, encryption)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged: {type(error).__name__} {error}") from error


def _decode(content: Mapping[str, Any], encryption: Encryption | None) -> Manifest:
    files = {
        _file_name(name): FileInfo(_count(item["bytes"]), _count(item["header_crc32"]))
        for name, item in content["files"].items()
    }
    tensors: dict[str, TensorInfo] = {}
    parts: dict[str, tuple[Part, ...]] = {}
    for name, item in content["tensors"].items():
        info = info_in(check_name(name), item)
        tensors[name] = info
        parts[name] = tuple(sorted((part_in(info, part) for part in item["parts"]), key=lambda part: part.start))
        check_parts(info, parts[name], files)
    aliases = dict(content["aliases"])
    for alias, name in aliases.items():
        if check_name(alias) in tensors or name not in tensors:
            raise CheckpointError(f"{alias!r} can't be another name of {name!r}")
    state, ranks = content["state"], content["ranks"]
    world_size = _count(content["world_size"])
    kept = isinstance(ranks, list) and len(ranks) == world_size and all(isinstance(item, dict) for item in ranks)
    if not isinstance(state, dict) or not kept:
        raise CheckpointError("'state' and 'ranks' are not what they must be")
    order = _count(content.get("order", 0))
    return Manifest(world_size, files, tensors, parts, aliases, state, tuple(ranks), order, encryption)


def check_name(name: object) -> str:
    """The name, if it is printable and no path that leaves a folder. Raises CheckpointError for any other."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise CheckpointError(f"a tensor is named {str(name)[:80]!r}, which is no name; refused")
    if "/" in name or "\\" in name or name.startswith("."):
        raise CheckpointError(f"a tensor is named {name[:80]!r}, which could lead out of a folder; refused")
    return name


def _file_name(name: object) -> str:
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise CheckpointError(f"a file is named {str(name)[:80]!r}, which no file of a checkpoint is; refused")
    return name


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_SIZE:
        raise CheckpointError(f"{str(value)[:40]!r} is no size; refused")
    return value


def info_in(name: str, item: Mapping[str, Any]) -> TensorInfo:
    """A tensor's description from JSON. Raises CheckpointError, KeyError, TypeError or ValueError."""
    dtype, compute = dtype_of(item["dtype"]), dtype_of(item.get("compute"))
    if dtype is None or (compute is None and item.get("compute") is not None):
        raise CheckpointError(f"tensor {name!r} has dtype {item['dtype']!r}, {item.get('compute')!r}: unknown")
    shape = tuple(_count(size) for size in item["shape"])
    if math.prod(shape) * dtype.itemsize > _MAX_SIZE:
        raise CheckpointError(f"tensor {name!r} has shape {list(shape)}; refused")
    kind = TensorKind(item["kind"])
    of, key = item.get("of", ""), item.get("key", "")
    if not isinstance(of, str) or not isinstance(key, str) or kind.of_optimizer != bool(of and key):
        raise CheckpointError(f"tensor {name!r}: state {key!r} of {of!r} is not what it must be")
    return TensorInfo(name, kind, dtype, shape, compute, bool(item.get("trainable", True)), of, key)


def _info_out(info: TensorInfo) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": info.kind.value,
        "dtype": name_of(info.dtype, info.name),
        "shape": list(info.shape),
    }
    if info.kind is TensorKind.PARAMETER:
        found["trainable"] = info.trainable
        found["compute"] = None if info.compute is None else name_of(info.compute, info.name)
    if info.kind.of_optimizer:
        found |= {"of": info.of, "key": info.key}
    return found


def info_out(info: TensorInfo) -> dict[str, Any]:
    """A tensor's description for JSON, with its name."""
    return {"name": info.name, **_info_out(info)}


def part_in(info: TensorInfo, item: Mapping[str, Any]) -> Part:
    """A part from JSON. Raises CheckpointError, KeyError, TypeError or ValueError."""
    offsets = tuple(_count(value) for value in item["offsets"])
    sizes = tuple(_count(value) for value in item["sizes"])
    within = len(offsets) == len(sizes) == len(info.shape) and all(
        offset + size <= whole for offset, size, whole in zip(offsets, sizes, info.shape, strict=True)
    )
    start = flat_start(info.shape, offsets) if within else 0
    stop = start + math.prod(sizes)
    if within and info.numel:
        flat = rectangles(info.shape, start, stop)
        within = [(cut.offsets, cut.sizes) for cut in flat] == [(offsets, sizes)]
    if not within:
        raise CheckpointError(f"tensor {info.name!r}: {list(offsets)} + {list(sizes)} is no part of {list(info.shape)}")
    checksums = tuple(_count(value) for value in item["crc32"])
    if len(checksums) != -(-(stop - start) * info.dtype.itemsize // BLOCK):
        raise CheckpointError(f"tensor {info.name!r} has {len(checksums)} checksums for its part at {list(offsets)}")
    return Part(_file_name(item["file"]), _count(item["begin"]), offsets, sizes, start, stop, checksums)


def part_out(part: Part) -> dict[str, Any]:
    """A part for JSON."""
    return {
        "file": part.file,
        "begin": part.begin,
        "offsets": list(part.offsets),
        "sizes": list(part.sizes),
        "crc32": list(part.checksums),
    }


def check_parts(info: TensorInfo, parts: tuple[Part, ...], files: Mapping[str, FileInfo]) -> None:
    """Raises CheckpointError unless the parts have all elements of the tensor, in order, and lie inside of their files.

    So no tensor can be larger than the files.
    """
    position = 0
    for part in parts:
        if part.start != position:
            raise CheckpointError(f"tensor {info.name!r}: elements from {position} on are missing or there twice")
        position = part.stop
        file = files.get(part.file)
        if file is None or part.begin + (part.stop - part.start) * info.dtype.itemsize > file.nbytes:
            raise CheckpointError(f"tensor {info.name!r} lies beyond the end of {part.file}")
    if position != info.numel:
        raise CheckpointError(f"tensor {info.name!r}: elements from {position} to {info.numel} are missing")
