"""Lazy tensors: tensors in files, and tensors that are joined from them.

    StoredTensor   dtype, shape and strides over bytes [start, start + length) of a file
    Joined         a tensor whose flat elements are pieces of other tensors, in order (ZeRO's partitions)
    Tiled          a tensor whose rectangles are other tensors (torch.distributed.checkpoint)
    Cast           another tensor in another dtype
    Copies         a tensor of which several files have a copy (tensor-parallel ranks)
    Mean           the mean of several tensors
    Rounded        a tensor that must round to another one (master weights, and the weights of the forward)

Reads read only the bytes that are needed, into new memory. Files are not mapped, so memory is freed with the result.
The first read of a range of a file compares its checksum, if it has one.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from zeroshard.errors import CheckpointError

_READ_AT_ONCE = 1 << 30
_MAX_COMPARED = 20_000_000
_SUMMED_AT_ONCE = 4 << 20


class Lazy(Protocol):
    """A tensor of known shape and dtype whose values are read on request."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self) -> torch.Tensor:
        """The whole tensor, contiguous, in new memory on the CPU. Raises CheckpointError."""
        ...

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) in row-major order, 1-D. Raises CheckpointError."""
        ...


def numel(shape: Sequence[int]) -> int:
    return math.prod(shape)


class Checksum:
    """The CRC-32 of a range of a file, which is compared once."""

    def __init__(self, crc32: int) -> None:
        self._crc32 = crc32
        self._compared = False

    def compare(self, content: FileRange) -> None:
        """Raises CheckpointError if the bytes of the range have another CRC-32."""
        if self._compared:
            return
        found = 0
        for start in range(0, content.length, _SUMMED_AT_ONCE):
            found = zlib.crc32(content.part(start, min(_SUMMED_AT_ONCE, content.length - start)).read(), found)
        if found != self._crc32:
            raise CheckpointError(
                f"{content.path} is damaged: bytes {content.start} to {content.start + content.length} have the "
                f"checksum {found:08x}, not {self._crc32:08x}; copy the file again, or take another checkpoint"
            )
        self._compared = True


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, start + length) of a file, which have a checksum or none."""

    path: Path
    start: int
    length: int
    checksum: Checksum | None = field(default=None, compare=False)

    def compare(self) -> None:
        """Raises CheckpointError if the bytes do not have their checksum; they are read once."""
        if self.checksum is not None:
            self.checksum.compare(self)

    def part(self, start: int, length: int) -> FileRange:
        if start < 0 or length < 0 or start + length > self.length:
            raise CheckpointError(f"{self.path}: it refers to bytes beyond its end; it is damaged")
        return FileRange(self.path, self.start + start, length)

    def read(self) -> bytearray:
        buffer = bytearray(self.length)
        self.read_into(memoryview(buffer))
        return buffer

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer`, which is as long as the range. Raises CheckpointError."""
        done = 0
        try:
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                while done < self.length:
                    part = buffer[done : done + _READ_AT_ONCE]
                    count = os.preadv(descriptor, [part], self.start + done)
                    if count == 0:
                        raise CheckpointError(f"{self.path} is shorter than it says; it is damaged or being written")
                    done += count
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"{self.path} can't be read: {error}") from error


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a storage in a file. `offset` and `strides` count elements."""

    storage: FileRange
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        where = f"{self.storage.path}: a tensor of shape {list(self.shape)}"
        if len(self.shape) != len(self.strides):
            raise CheckpointError(f"{where} has {len(self.strides)} strides")
        if numel(self.shape) == 0:
            return
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        if self.offset < 0 or (last + 1) * self.dtype.itemsize > self.storage.length:
            raise CheckpointError(f"{where} is larger than the data behind it ({self.storage.length} bytes); refused")
        if numel(self.shape) > self.storage.length // self.dtype.itemsize:
            raise CheckpointError(f"{where} shows the same data many times over; refused")

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= max(size, 1)
        return True

    def read(self) -> torch.Tensor:
        if self.contiguous or not numel(self.shape):
            return self.read_flat(0, numel(self.shape)).reshape(self.shape)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self._elements(self.offset, extent).as_strided(self.shape, self.strides).contiguous()

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        if not self.contiguous:
            return self.read().reshape(-1)[start:stop].clone()
        return self._elements(self.offset + start, stop - start)

    def fill(self, out: torch.Tensor, start: int) -> None:
        """Read elements from `start` on into `out`, 1-D, contiguous and of the same dtype, without another copy."""
        if self.contiguous:
            self._fill(out, self.offset + start)
        else:
            out.copy_(self.read_flat(start, start + len(out)))

    def _fill(self, out: torch.Tensor, start: int) -> None:
        if len(out):
            self.storage.compare()
            part = self.storage.part(start * self.dtype.itemsize, out.nbytes)
            part.read_into(out.view(torch.uint8).numpy().data)

    def _elements(self, start: int, count: int) -> torch.Tensor:
        out = torch.empty(count, dtype=self.dtype)
        self._fill(out, start)
        return out


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + count) of a tensor, in row-major order."""

    of: Lazy
    start: int
    count: int


@dataclass(frozen=True)
class Joined:
    """A tensor of `shape` whose elements in row-major order are `pieces`, one after the other."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if sum(piece.count for piece in self.pieces) != numel(self.shape):
            raise CheckpointError(f"the pieces of a tensor of shape {list(self.shape)} do not fill it")
        for piece in self.pieces:
            if piece.start < 0 or piece.start + piece.count > numel(piece.of.shape) or piece.of.dtype != self.dtype:
                raise CheckpointError(f"a piece of a tensor of shape {list(self.shape)} is not where it should be")

    def read(self) -> torch.Tensor:
        return self.read_flat(0, numel(self.shape)).reshape(self.shape)

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        out = torch.empty(stop - start, dtype=self.dtype)
        at = 0
        for piece in self.pieces:
            first, last = max(start, at), min(stop, at + piece.count)
            if first < last:
                inside = piece.start - at
                part = out[first - start : last - start]
                if isinstance(piece.of, StoredTensor):
                    piece.of.fill(part, first + inside)
                else:
                    part.copy_(piece.of.read_flat(first + inside, last + inside))
            at += piece.count
        return out


@dataclass(frozen=True)
class Tile:
    """A rectangle of a tensor: the indices of its first element, and its values."""

    offsets: tuple[int, ...]
    content: Lazy


@dataclass(frozen=True)
class Tiled:
    """A tensor of `shape` that rectangles fill without overlap."""

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        where = f"a tensor of shape {list(self.shape)}"
        for tile in self.tiles:
            sizes = tile.content.shape
            fits = len(tile.offsets) == len(sizes) == len(self.shape) and all(
                offset >= 0 and offset + size <= whole
                for offset, size, whole in zip(tile.offsets, sizes, self.shape, strict=True)
            )
            if not fits or tile.content.dtype != self.dtype:
                raise CheckpointError(f"a rectangle of {where} does not fit into it")
        if sum(numel(tile.content.shape) for tile in self.tiles) != numel(self.shape) or self._overlap():
            raise CheckpointError(f"the rectangles of {where} do not fill it exactly once")

    def _overlap(self) -> bool:
        filled = [tile for tile in self.tiles if numel(tile.content.shape)]
        if len(self.shape) == 0:
            return len(filled) > 1
        filled.sort(key=lambda tile: tile.offsets)
        ends = [tuple(o + s for o, s in zip(t.offsets, t.content.shape, strict=True)) for t in filled]
        compared = 0
        for index, tile in enumerate(filled):
            for other in range(index + 1, len(filled)):
                if filled[other].offsets[0] >= ends[index][0]:
                    break
                compared += 1
                if compared > _MAX_COMPARED:
                    raise CheckpointError(f"a tensor of shape {list(self.shape)} is cut into absurdly many rectangles")
                if all(map(int.__lt__, tile.offsets, ends[other])) and all(
                    map(int.__lt__, filled[other].offsets, ends[index])
                ):
                    return True
        return False

    def read(self) -> torch.Tensor:
        if len(self.tiles) == 1 and self.tiles[0].content.shape == self.shape:
            return self.tiles[0].content.read()
        return self.read_flat(0, numel(self.shape)).reshape(self.shape)

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        if not self.shape:
            return self.tiles[0].content.read_flat(start, stop)
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        row = numel(self.shape[1:])
        first, last = start // row, -(-stop // row)
        rows = torch.empty((last - first, *self.shape[1:]), dtype=self.dtype)
        for tile in self.tiles:
            self._read_rows(tile, first, last, rows)
        return rows.reshape(-1)[start - first * row : stop - first * row]

    @staticmethod
    def _read_rows(tile: Tile, first: int, last: int, rows: torch.Tensor) -> None:
        """Copy the part of a tile that is in rows [first, last) into `rows`."""
        sizes = tile.content.shape
        low, high = max(first, tile.offsets[0]), min(last, tile.offsets[0] + sizes[0])
        if low >= high or not numel(sizes):
            return
        of_tile = numel(sizes[1:])
        inside = low - tile.offsets[0]
        part = tile.content.read_flat(inside * of_tile, (inside + high - low) * of_tile)
        into = rows[low - first : high - first]
        for dim in range(1, len(sizes)):
            into = into.narrow(dim, tile.offsets[dim], sizes[dim])
        into.copy_(part.reshape(high - low, *sizes[1:]))


@dataclass(frozen=True)
class _OfRanks:
    """Tensors of one shape and dtype, one of each rank. `told` is for messages."""

    of: tuple[Lazy, ...]
    told: str

    def __post_init__(self) -> None:
        found = [(list(one.shape), str(one.dtype)) for one in self.of]
        if any(one != found[0] for one in found):
            raise CheckpointError(f"{self.told}: the ranks have shapes and dtypes {found}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.of[0].dtype


class Copies(_OfRanks):
    """A tensor that is there several times. Reads raise CheckpointError, with `told`, if the copies differ in a bit."""

    def read(self) -> torch.Tensor:
        whole = self.of[0].read()
        flat = whole.reshape(-1)
        at = 0
        for parts in zip(*(chunks(one) for one in self.of[1:]), strict=True):
            self._compare(flat[at : at + len(parts[0])], parts)
            at += len(parts[0])
        return whole

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        part = self.of[0].read_flat(start, stop)
        self._compare(part, [one.read_flat(start, stop) for one in self.of[1:]])
        return part

    def _compare(self, part: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
        own = part.contiguous().view(torch.uint8)
        for number, other in enumerate(others, 1):
            if not torch.equal(own, other.view(torch.uint8)):
                raise CheckpointError(f"{self.told}: the values of ranks 0 and {number} differ")


class Mean(_OfRanks):
    """The mean of several tensors."""

    def read(self) -> torch.Tensor:
        return self.read_flat(0, numel(self.shape)).reshape(self.shape)

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        total = self.of[0].read_flat(start, stop)
        for one in self.of[1:]:
            total += one.read_flat(start, stop)
        return total.div_(len(self.of))


@dataclass(frozen=True)
class Rounded:
    """A tensor of which other files hold roundings, all of its shape; what is read of it must round to one of them.

    Attributes:
        roundings: in a floating-point dtype of at least 2 bytes.
        told: for messages: what differs, and what to do.
    """

    of: Lazy
    roundings: tuple[Lazy, ...]
    told: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def read(self) -> torch.Tensor:
        whole = self.of.read()
        flat = whole.reshape(-1)
        step = max(1, _SUMMED_AT_ONCE // self.dtype.itemsize)
        for start in range(0, len(flat), step):
            self._compare(flat[start : start + step], start)
        return whole

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        part = self.of.read_flat(start, stop)
        self._compare(part, start)
        return part

    def _compare(self, part: torch.Tensor, start: int) -> None:
        for rounding in self.roundings:
            held = rounding.read_flat(start, start + len(part))
            own = part.to(held.dtype)
            if bool(((own == held) | (own.isnan() & held.isnan())).all()):
                return
        raise CheckpointError(self.told)


@dataclass(frozen=True)
class Cast:
    """Another tensor, in another dtype."""

    of: Lazy
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def read(self) -> torch.Tensor:
        return self.of.read().to(self.dtype)

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        return self.of.read_flat(start, stop).to(self.dtype)


@dataclass(frozen=True)
class InMemory:
    """A tensor in memory."""

    value: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def read(self) -> torch.Tensor:
        return self.value.detach().clone(memory_format=torch.contiguous_format)

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        return self.value.detach().reshape(-1)[start:stop].clone()


class ReadWhole:
    """A tensor that can't be read in parts: it is read whole with the first part, and dropped with the last one."""

    def __init__(self, of: Lazy) -> None:
        self._of = of
        self._value: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._of.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._of.dtype

    def read(self) -> torch.Tensor:
        return self._of.read()

    def read_flat(self, start: int, stop: int) -> torch.Tensor:
        if self._value is None:
            self._value = self._of.read().reshape(-1)
        part = self._value[start:stop]
        if stop == len(self._value):
            self._value = None
        return part


def chunks(tensor: Lazy, bytes_at_once: int = 4 << 20) -> Iterator[torch.Tensor]:
    """The elements of a tensor in row-major order, as 1-D tensors of at most `bytes_at_once` bytes."""
    step = max(1, bytes_at_once // tensor.dtype.itemsize)
    total = numel(tensor.shape)
    for start in range(0, total, step):
        yield tensor.read_flat(start, min(total, start + step))
