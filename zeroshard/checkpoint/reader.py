"""Reads any part of any tensor of a checkpoint, without reading the rest, and compares each block with its checksum.

    with CheckpointReader(find("checkpoints")) as reader:
        for name in reader.names(TensorKind.PARAMETER):
            tensor = reader.tensor(name)                  # shape and dtype; nothing is read yet
            tensor.read_flat(1000, 2000)                  # 1-D
            tensor.read_rectangle((0, 8), (4, 8))         # rows 0 to 3, columns 8 to 15

Opening checks all that can be checked without reading tensors: that every file has its size, and that the parts of each
tensor make up all of it. Headers and checksums are checked by reads. Bytes are read into the memory of the result.
Rejected: mapping the file, which ends in a SIGBUS if the file is truncated meanwhile, and counts as the process's
memory.
"""

from __future__ import annotations

import math
import mmap
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zeroshard.checkpoint.encrypted_file import Readable, nbytes_on_disk, open_file
from zeroshard.checkpoint.jsonfile import plain_size
from zeroshard.checkpoint.keys import KeyService, key_in_environment
from zeroshard.checkpoint.manifest import BLOCK, FileInfo, Manifest, Part, TensorInfo, TensorKind, read_manifest
from zeroshard.checkpoint.safetensors_header import read_header
from zeroshard.errors import CheckpointError, UsageError

_ROWS_NBYTES = 16 << 20


class StateReader(ABC):
    """What a load reads from: a checkpoint, or images in the memory of nodes."""

    folder: Path
    manifest: Manifest

    def names(self, kind: TensorKind | None = None) -> list[str]:
        """Names of all tensors, or of those of one kind, without `aliases`."""
        return [name for name, info in self.manifest.tensors.items() if kind is None or info.kind is kind]

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of tied parameters -> the name of the tensor."""
        return self.manifest.aliases

    @property
    def state(self) -> Mapping[str, Any]:
        """All state that is no tensor."""
        return self.manifest.state

    def tensor(self, name: str) -> SavedTensor:
        """A tensor by its name or an alias. Raises CheckpointError if there is none."""
        name = self.manifest.aliases.get(name, name)
        info = self.manifest.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}")
        return SavedTensor(self, info, self.manifest.parts[name])

    @abstractmethod
    def read_part(self, info: TensorInfo, part: Part, start: int, stop: int, out: memoryview) -> None:
        """Fill `out` with bytes [start, stop) of a part. Raises CheckpointError naming the tensor."""

    @abstractmethod
    def close(self) -> None:
        """Close what reading has opened."""


class CheckpointReader(StateReader):
    """A checkpoint of zeroshard, open for reading.

    Args:
        folder: the folder of one checkpoint, with `checkpoint.json`; `directory.find` returns it.
        service: has the key of an encrypted checkpoint; None for the key that the environment names (see `keys`).

    Raises:
        CheckpointError: a file is missing, has another size, or does not match the table, or the table is invalid.
    """

    def __init__(self, folder: str | os.PathLike[str], service: KeyService | None = None) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(self.folder, key_in_environment() if service is None else service)
        self._files: dict[str, Readable] = {}
        self._checked: set[str] = set()
        self._spare: memoryview | None = None
        for name, info in self.manifest.files.items():
            self._check_size(name, info.nbytes)

    def _check_size(self, name: str, nbytes: int) -> None:
        holds = f"it should hold {self._tensors_of(name)}"
        try:
            size = plain_size(self.folder / name)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {holds}") from error
        expected = nbytes_on_disk(nbytes, self.manifest.encryption)
        if size != expected:
            raise CheckpointError(
                f"{self.folder / name} has {size} bytes instead of {expected}: it was cut off or replaced; {holds}"
            )

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; later reads open them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def verify(self, progress: Callable[[int], None] = lambda nbytes: None) -> list[str]:
        """Read everything; returns a line per problem. `progress` is called with the bytes read since its last call."""
        problems: list[str] = []
        for name in self.manifest.files:
            try:
                self._open(name)
            except CheckpointError as error:
                problems.append(str(error))
        for name, parts in self.manifest.parts.items():
            info = self.manifest.tensors[name]
            for part in parts:
                try:
                    for block in range(len(part.checksums)):
                        progress(len(self._block(info, part, block)))
                except CheckpointError as error:
                    problems.append(str(error))
        return problems

    def read_part(self, info: TensorInfo, part: Part, start: int, stop: int, out: memoryview) -> None:
        """Fill `out` with bytes [start, stop) of a part. Raises CheckpointError naming file and tensor."""
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            base = block * BLOCK
            low, high = max(start, base), min(stop, base + BLOCK)
            if (low, high) == (base, self._block_end(info, part, block)):
                self._block(info, part, block, out[low - start : high - start])
            else:
                out[low - start : high - start] = self._block(info, part, block)[low - base : high - base]

    @staticmethod
    def _block_end(info: TensorInfo, part: Part, block: int) -> int:
        return min((block + 1) * BLOCK, (part.stop - part.start) * info.dtype.itemsize)

    def _block(self, info: TensorInfo, part: Part, block: int, out: memoryview | None = None) -> memoryview:
        """One verified block of a part, in `out` or else in memory that the next call reuses."""
        length = self._block_end(info, part, block) - block * BLOCK
        view = self._buffer(length) if out is None else out
        file, place = self.folder / part.file, part.begin + block * BLOCK
        opened = self._open(part.file)
        done = 0
        while done < length:
            try:
                count = opened.read_into(view[done:], place + done)
            except OSError as error:
                raise CheckpointError(f"{file} can't be read at tensor {info.name!r}: {error}") from error
            except ValueError as error:
                raise CheckpointError(f"{file} is damaged at tensor {info.name!r}: {error}") from error
            if count == 0:
                raise CheckpointError(f"{file} ends inside of tensor {info.name!r}: it was cut off")
            done += count
        if zlib.crc32(view) != part.checksums[block]:
            raise CheckpointError(
                f"{file} is damaged: tensor {info.name!r} does not match its checksum "
                f"(bytes {place} to {place + length} of the file)"
            )
        return view

    def _buffer(self, length: int) -> memoryview:
        if self._spare is None:
            self._spare = memoryview(mmap.mmap(-1, BLOCK))
        return self._spare[:length]

    def _open(self, name: str) -> Readable:
        info, file = self.manifest.files[name], self.folder / name
        if name not in self._files:
            try:
                self._files[name] = open_file(file, info.nbytes, self.manifest.encryption)
            except OSError as error:
                raise CheckpointError(f"{file} can't be read: {error.strerror}") from error
        opened = self._files[name]
        if name not in self._checked:
            self._check_header(name, opened, info)
            self._checked.add(name)
        return opened

    def _check_header(self, name: str, opened: Readable, info: FileInfo) -> None:
        why = "does not match its checksum"
        try:
            if read_header(opened.read_into, info.nbytes) == info.header_checksum:
                return
        except ValueError as error:
            why = f"does not open: {error}"
        raise CheckpointError(
            f"{self.folder / name} is damaged: its header {why}; it should hold {self._tensors_of(name)}"
        )

    def _tensors_of(self, file: str) -> str:
        names = [name for name, parts in self.manifest.parts.items() if any(part.file == file for part in parts)]
        return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class SavedTensor:
    """A tensor of a checkpoint whose values are read on request. `info` has its name, kind and more."""

    def __init__(self, reader: StateReader, info: TensorInfo, parts: Sequence[Part]) -> None:
        self._reader = reader
        self._parts = parts
        self.info = info

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.info.dtype

    def read(self) -> torch.Tensor:
        """The whole tensor, on the CPU. Like all reads, raises CheckpointError, naming file and tensor, for damage."""
        return self.read_flat(0, self.info.numel).reshape(self.shape)

    def read_flat(self, start: int, stop: int, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Elements [start, stop) in row-major order, 1-D, on the CPU. At most one more block at each end is read.

        Args:
            buffer: uint8 memory that is large enough; the result is a view of it.
        """
        if not 0 <= start <= stop <= self.info.numel:
            raise UsageError(f"[{start}, {stop}) is no range of {self.info.name!r}, which has {self.info.numel}")
        itemsize = self.dtype.itemsize
        nbytes = (stop - start) * itemsize
        raw = torch.empty(nbytes, dtype=torch.uint8) if buffer is None else buffer[:nbytes]
        out = raw.numpy().data
        for part in self._parts:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                self._reader.read_part(
                    self.info,
                    part,
                    (low - part.start) * itemsize,
                    (high - part.start) * itemsize,
                    out[(low - start) * itemsize : (high - start) * itemsize],
                )
        return raw.view(self.dtype) if start < stop else torch.empty(0, dtype=self.dtype)

    def read_rectangle(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Elements [offset, offset + size) in each dim, on the CPU.

        If they are no flat range, whole rows are read, some MiB at a time.
        """
        shape = self.shape
        fits = len(offsets) == len(sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= whole
            for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not fits:
            raise UsageError(f"{list(offsets)} + {list(sizes)} is no part of {self.info.name!r} {list(shape)}")
        if not shape:
            return self.read()
        out = torch.empty(tuple(sizes), dtype=self.dtype)
        if out.numel():
            row = math.prod(shape[1:])
            inner = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], sizes[1:], strict=True))
            step = max(1, _ROWS_NBYTES // max(1, row * self.dtype.itemsize))
            for first in range(0, sizes[0], step):
                last = min(sizes[0], first + step)
                rows = self.read_flat((offsets[0] + first) * row, (offsets[0] + last) * row)
                out[first:last] = rows.view(last - first, *shape[1:])[(slice(None), *inner)]
        return out
