"""Writes a file of `torch.save`, such as `pytorch_model.bin`, without having its tensors in memory.

torch writes the file with empty space for the tensors' bytes (`torch.serialization.skip_data`); the reader of
`foreign.torchzip` finds that space, and the bytes are written there, a chunk at a time. `torch.load(weights_only=True)`
reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroshard.checkpoint.export.safetensors_stream import Progress, write_tensor
from zeroshard.checkpoint.foreign.stored import Lazy, StoredTensor
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.errors import CheckpointError


def reserve(
    path: Path, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], aliases: Mapping[str, str]
) -> dict[str, StoredTensor]:
    """Write a state dict with empty space for its tensors; returns the place of each. Aliases share space."""
    with FakeTensorMode():
        state = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    places = _reserve(path, {**state, **{alias: state[name] for alias, name in aliases.items()}})
    return {name: places[name] for name in shapes}


def save_tensor(path: Path, tensor: Lazy, progress: Progress = lambda count: None) -> None:
    """Write a file of `torch.save` with one tensor. Raises CheckpointError if that fails."""
    with FakeTensorMode():
        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
    fill(path, [(_reserve(path, fake), tensor)], progress)


def _reserve(path: Path, value: Any) -> Any:
    """Write a value without the bytes of its tensors, and read it back for their places."""
    if path.exists():
        raise CheckpointError(f"{path} exists already")
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(value, path)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        raise CheckpointError(f"{path} can't be written: {error}") from error
    return load(path)


def fill(path: Path, tensors: Iterable[tuple[StoredTensor, Lazy]], progress: Progress = lambda count: None) -> int:
    """Write each tensor's bytes to its place, and sync the file to the disk; returns the number of bytes."""
    total = 0
    try:
        with path.open("r+b") as file:
            for place, tensor in tensors:
                file.seek(place.storage.start + place.offset * place.dtype.itemsize)
                total += write_tensor(file.write, tensor, progress)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} can't be written: {error}") from error
    return total
