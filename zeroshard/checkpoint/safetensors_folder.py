"""Reads slices of tensors from a folder of safetensors files in the layout of Hugging Face's hub.

    model.safetensors.index.json   {"weight_map": {name: file}}, which decides for tensors that are in two files;
                                   without it one file alone, or all *.safetensors of the folder
    FILE                           | 8 bytes: length of the header | header: JSON | tensor | tensor | ...

Reads use `pread`. Rejected: mapping the files, whose pages count as the process's memory, and which a network file
system serves one by one.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

import torch

from zeroshard.checkpoint.dtypes import dtype_of
from zeroshard.checkpoint.jsonfile import no_duplicate_keys
from zeroshard.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LARGEST_HEADER = 2**30
_LONGEST_NAME = 200


@dataclass(frozen=True)
class StoredWeight:
    """The place of a tensor: `start` is its first byte in `file`."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class SafetensorsFolder:
    """The tensors of a folder by name. A context manager; files are opened when they are first read.

    Raises:
        CheckpointError: there is no safetensors file, or a file does not match its header or the index.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        placed = _placed_by(index) if index.is_file() else {}
        self.weights = _chosen(self._files(sorted({*placed.values()})), placed, index)
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, 1-D, in its dtype, in new host memory."""
        weight = self.weights[name]
        values = torch.empty(stop - start, dtype=weight.dtype)
        if stop == start:
            return values
        buffer = values.view(torch.uint8).numpy().data.cast("B")
        at = weight.start + start * weight.dtype.itemsize
        while buffer:
            count = os.preadv(self._descriptor(weight.file), [buffer], at)
            if count == 0:
                raise CheckpointError(f"{weight.file}: ends within tensor {name!r}; copy the file again")
            buffer, at = buffer[count:], at + count
        return values

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
        return self._descriptors[file]

    def _files(self, named: list[str]) -> list[Path]:
        """The files that an index names, else the one file, else all."""
        files = [self.folder / name for name in named]
        if not files:
            single = self.folder / SINGLE
            files = [single] if single.is_file() else sorted(self.folder.glob("*.safetensors"))
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            what = f"{', '.join(missing)} of {INDEX} are missing" if missing else "there is no safetensors file"
            raise CheckpointError(f"{self.folder}: {what}; weights in other formats are to be converted first")
        return files


def _chosen(files: list[Path], placed: dict[str, str], index: Path) -> dict[str, StoredWeight]:
    """The place of each tensor: the index's, or for tensors that the index lacks the only file that has them."""
    found: dict[str, StoredWeight] = {}
    for weight in (weight for file in files for weight in _header(file)):
        place = placed.get(weight.name, weight.file.name)
        if place != weight.file.name:
            continue
        if weight.name in found:
            raise CheckpointError(
                f"{weight.file}: holds {weight.name!r}, and so does {found[weight.name].file.name}; no {INDEX} "
                "says which of them counts: remove one of the files, or write the index"
            )
        found[weight.name] = weight
    for name, place in placed.items():
        if name not in found:
            raise CheckpointError(f"{index}: has {name!r} in {place}, which does not hold it; copy both files again")
    return found


def _header(file: Path) -> list[StoredWeight]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else _LARGEST_HEADER + 1
        if length > min(size, _LARGEST_HEADER):
            raise CheckpointError(f"{file}: is no safetensors file (its header can't have {length} bytes)")
        table = _parsed(opened.read(length), f"{file}: is no safetensors file (its header")
    table.pop("__metadata__", None)
    weights = [_stored(file, name, entry, 8 + length, size) for name, entry in table.items()]
    end = 0
    for weight in sorted(weights, key=lambda weight: (weight.start, weight.nbytes)):
        if weight.start < end:
            raise CheckpointError(f"{file}: tensor {weight.name!r} shares bytes with another one; copy the file again")
        end = weight.start + weight.nbytes
    return weights


def _stored(file: Path, name: str, entry: Any, begin: int, size: int) -> StoredWeight:
    """One entry of a header that ends at `begin`, in a file of `size` bytes, after all of it was checked."""
    table = entry if _is_table(entry) else {}
    kind, shape, offsets = (table.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(kind, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise CheckpointError(f"{file}: tensor {name!r} lacks dtype, shape or place in the header; copy the file again")
    dtype, (start, stop) = dtype_of(kind), offsets
    if dtype is None:
        raise CheckpointError(f"{file}: tensor {name!r} has dtype {kind}, which is not known here")
    made = StoredWeight(name, file, dtype, tuple(shape), begin + start)
    if stop - start != made.nbytes or begin + stop > size:
        raise CheckpointError(f"{file}: tensor {name!r} does not fit its place; copy the file again")
    return made


def _placed_by(index: Path) -> dict[str, str]:
    """The file of each tensor by an index. Names that are no plain file names are refused, since they become paths."""
    table = _parsed(index.read_bytes(), f"{index}: can't be used (the index").get("weight_map")
    if not _is_table(table) or not table:
        raise CheckpointError(f"{index}: has no table 'weight_map' from tensors to files; copy the file again")
    placed = {tensor: str(name) for tensor, name in table.items()}
    for name in placed.values():
        if Path(name).name != name or not name.endswith(".safetensors") or len(name) > _LONGEST_NAME:
            raise CheckpointError(f"{index}: names the file {name[:80]!r}; only *.safetensors files beside it are read")
    return placed


def _parsed(text: bytes, what: str) -> dict[str, Any]:
    try:
        table = json.loads(text, object_pairs_hook=no_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is no JSON: {error}); copy the file again") from None
    if not _is_table(table):
        raise CheckpointError(f"{what} is no JSON object); copy the file again")
    return table


def _is_table(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
