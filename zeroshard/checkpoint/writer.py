"""Writes one rank's pieces of tensors as safetensors files, with a table of them.

A `Piece` is a flat range of a tensor that the rank has, read some MiB at a time. Its rectangles go to files 0, 1, 2,
... of the rank, since a safetensors file has each name only once. No whole tensor is made.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint import jsonfile
from zeroshard.checkpoint.encrypted_file import new_file
from zeroshard.checkpoint.encryption import Encryption
from zeroshard.checkpoint.manifest import (
    BLOCK,
    FileInfo,
    Manifest,
    Part,
    TensorInfo,
    TensorKind,
    check_name,
    check_parts,
    info_in,
    info_out,
    part_in,
    part_out,
)
from zeroshard.checkpoint.safetensors_header import header
from zeroshard.checkpoint.signature import digest_of_file
from zeroshard.checkpoint.slices import Rectangle, rectangles
from zeroshard.checkpoint.temporary_files import naming, write_synced
from zeroshard.errors import CheckpointError

_COPY_NBYTES = 64 << 20
_SEALED = "sealed"
_MODEL = (TensorKind.PARAMETER, TensorKind.BUFFER, TensorKind.RANK_BUFFER)


@dataclass(frozen=True)
class Piece:
    """Flat elements [start, stop) of a tensor.

    Attributes:
        values: returns elements [low, high) of the tensor, within [start, stop): 1-D, contiguous, on any device, in the
            dtype of `info`. Its result is not used after its next call.
        source: a copy of all elements on the CPU, which is used instead of `values`; None for none.
    """

    info: TensorInfo
    start: int
    stop: int
    values: Callable[[int, int], torch.Tensor]
    source: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.info.dtype.itemsize

    def read(self, low: int, high: int) -> torch.Tensor:
        """Elements [low, high) on the CPU, 1-D and contiguous."""
        if self.source is not None:
            return self.source[low - self.start : high - self.start]
        return self.values(low, high).detach().cpu().contiguous()

    def copy_into(self, out: torch.Tensor) -> None:
        """Copy all elements into `out` (1-D); on a device, in the order of the current stream."""
        step = _COPY_NBYTES // self.info.dtype.itemsize
        for low in range(self.start, self.stop, step):
            high = min(low + step, self.stop)
            out[low - self.start : high - self.start].copy_(self.values(low, high).detach(), non_blocking=True)


def write_pieces(
    folder: Path,
    rank: int,
    pieces: Iterable[Piece],
    rank_state: Mapping[str, Any],
    encryption: Encryption | None = None,
    *,
    digests: bool = False,
) -> None:
    """Write a rank's pieces into `folder`, and last a table of them, which `join_tables` reads.

    Args:
        rank_state: JSON values of this rank.
        encryption: encrypts files and table; None for none.
        digests: compute the SHA-256 of each file, for a signature. It is read again for that, mostly from the cache.

    Raises:
        CheckpointError: a name or dtype is not allowed in checkpoints.
        OSError: a file can't be written.
    """
    files: dict[str, list[tuple[Piece, Rectangle]]] = {}
    for piece in pieces:
        check_name(piece.info.name)
        kind = "model" if piece.info.kind in _MODEL else "optimizer"
        if piece.start < piece.stop or not piece.info.numel:
            for number, cut in enumerate(rectangles(piece.info.shape, piece.start, piece.stop)):
                files.setdefault(f"{kind}-{rank:05d}-{number}.safetensors", []).append((piece, cut))
    table: dict[str, Any] = {"files": {}, "tensors": [], "rank_state": rank_state}
    for name, entries in files.items():
        info, parts = _write_file(folder, name, entries, encryption)
        digest = digest_of_file(folder / name) if digests else ""
        table["files"][name] = {"bytes": info.nbytes, "header_crc32": info.header_checksum, "sha256": digest}
        table["tensors"] += [
            {**info_out(piece.info), "part": part_out(part)} for (piece, _), part in zip(entries, parts, strict=True)
        ]
    where = _table(folder, rank)
    write_synced(
        where, jsonfile.encode(table if encryption is None else {_SEALED: encryption.encrypt_table(where.name, table)})
    )


def _table(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _write_file(
    folder: Path, name: str, entries: list[tuple[Piece, Rectangle]], encryption: Encryption | None
) -> tuple[FileInfo, list[Part]]:
    head = header([(piece.info, cut) for piece, cut in entries])
    parts: list[Part] = []
    at = len(head)
    total = at + sum((cut.stop - cut.start) * piece.info.dtype.itemsize for piece, cut in entries)
    with naming(folder / name), new_file(folder / name, total, encryption) as sink:
        sink.write(memoryview(head))
        for piece, cut in entries:
            checksums: list[int] = []
            step = BLOCK // piece.info.dtype.itemsize
            for low in range(cut.start, cut.stop, step):
                values = piece.read(low, min(low + step, cut.stop))
                data = values.view(torch.uint8).numpy().data
                checksums.append(zlib.crc32(data))
                sink.write(data)
            parts.append(Part(name, at, cut.offsets, cut.sizes, cut.start, cut.stop, tuple(checksums)))
            at += (cut.stop - cut.start) * piece.info.dtype.itemsize
        sink.finish()
    return FileInfo(at, zlib.crc32(head)), parts


def join_tables(
    folder: Path,
    world_size: int,
    aliases: Mapping[str, str],
    state: Mapping[str, Any],
    encryption: Encryption | None = None,
) -> Manifest:
    """Join the tables of all ranks to that of the checkpoint, and remove them.

    Raises:
        CheckpointError: the ranks' parts do not make up each tensor, or a rank's files are not in this folder.
    """
    files: dict[str, FileInfo] = {}
    tensors: dict[str, TensorInfo] = {}
    parts: dict[str, list[Part]] = {}
    ranks: list[Mapping[str, Any]] = []
    for rank in range(world_size):
        where = _table(folder, rank)
        if not where.is_file():
            raise CheckpointError(
                f"{where} is not there, though rank {rank} has written it: do all nodes see the same {folder.parent}?"
            )
        table = jsonfile.decode(jsonfile.read_bytes(where), where)
        table = table if encryption is None else encryption.decrypt_table(where.name, table.get(_SEALED), where)
        ranks.append(table["rank_state"])
        for name, item in table["files"].items():
            files[name] = FileInfo(item["bytes"], item["header_crc32"], item["sha256"])
        for item in table["tensors"]:
            info = info_in(item["name"], item)
            if tensors.setdefault(info.name, info) != info:
                raise CheckpointError(f"{where}: rank {rank} has another {info.name!r} than the ranks before")
            parts.setdefault(info.name, []).append(part_in(info, item["part"]))
    sorted_parts = {name: tuple(sorted(found, key=lambda part: part.start)) for name, found in parts.items()}
    for name, info in tensors.items():
        check_parts(info, sorted_parts[name], files)
    for rank in range(world_size):
        _table(folder, rank).unlink()
    return Manifest(world_size, files, tensors, sorted_parts, aliases, state, tuple(ranks), encryption=encryption)
