"""Loads a rank's part of a checkpoint, after all ranks have checked theirs.

    1  open and compare      every name, shape and counter; all differences are one error
    2  read all targets      each byte is compared with its checksum
    3  agree                 if any rank failed, all ranks fail, and nothing has been changed
    4  read again and write  a few MiB at a time

So a load changes everything or nothing, and takes no memory. Reading twice costs little, since the pages are mostly in
the cache. Rejected: keeping what was read, which takes the size of the rank's state once more.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.reader import StateReader
from zeroshard.errors import CheckpointError

_CHUNK_NBYTES = 16 << 20
_MAX_LISTED = 8


@dataclass(frozen=True)
class Target:
    """Flat elements [start, stop) of a tensor that this rank loads.

    Attributes:
        name: the tensor's name in the checkpoint.
        shape: shape of the whole tensor; must be that in the checkpoint.
        write: is called with the number of the first element and the values from there on: 1-D, on the CPU, in the
            checkpoint's dtype. Their memory is reused afterwards.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    write: Callable[[int, torch.Tensor], None]


def check(reader: StateReader, targets: Sequence[Target], more: Iterable[str] = ()) -> None:
    """Raises one CheckpointError for all targets that are missing or have another shape, and the problems `more`."""
    problems = list(more)
    for target in targets:
        if not has(reader, target.name):
            problems.append(f"tensor {target.name!r} is missing")
        elif (shape := reader.tensor(target.name).shape) != target.shape:
            problems.append(f"tensor {target.name!r} has shape {list(shape)}, this run needs {list(target.shape)}")
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:_MAX_LISTED])
        rest = f"\n  and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise CheckpointError(
            f"{reader.folder / MANIFEST} does not fit this run; nothing was changed:\n{listed}{rest}\n"
            "load it into the model, and with the optimizer, that it was saved from"
        )


def has(reader: StateReader, name: str) -> bool:
    """Whether a checkpoint has a tensor, under its name or an alias."""
    return name in reader.manifest.tensors or name in reader.aliases


def verify(reader: StateReader, targets: Sequence[Target]) -> None:
    """Read all targets. Raises CheckpointError, naming file and tensor, for damage."""
    buffer = _new_buffer()
    for target in targets:
        for _ in _chunks(reader, target, buffer):
            pass


def apply(reader: StateReader, targets: Sequence[Target]) -> None:
    """Read all targets, and call their `write`."""
    buffer = _new_buffer()
    for target in targets:
        for low, values in _chunks(reader, target, buffer):
            target.write(low, values)


def _new_buffer() -> torch.Tensor:
    """Memory for chunks. It is not from malloc, where later allocations would keep it from being freed."""
    return torch.frombuffer(mmap.mmap(-1, _CHUNK_NBYTES), dtype=torch.uint8)


def _chunks(reader: StateReader, target: Target, buffer: torch.Tensor) -> Iterable[tuple[int, torch.Tensor]]:
    saved = reader.tensor(target.name)
    step = _CHUNK_NBYTES // saved.dtype.itemsize
    for low in range(target.start, target.stop, step):
        yield low, saved.read_flat(low, min(low + step, target.stop), buffer)
