"""Writes a safetensors file without having its tensors in memory.

    | length of header: 8 bytes | header: JSON, name -> dtype, shape, bytes | padding | tensor | tensor | ...

The header needs shapes and dtypes only, so it is written first and the tensors follow, a chunk at a time. Rejected:
`safetensors.torch.save_file`, which needs all tensors of a file at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from zeroshard.checkpoint.dtypes import name_of
from zeroshard.checkpoint.foreign.stored import Lazy, chunks, numel
from zeroshard.checkpoint.sink import open_sink
from zeroshard.errors import CheckpointError

Progress = Callable[[int], None]  # bytes written since the last call


def header(tensors: Mapping[str, Lazy], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file of `tensors` in this order. Raises CheckpointError for a dtype it can't hold."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        dtype = name_of(tensor.dtype, name)
        size = numel(tensor.shape) * tensor.dtype.itemsize
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write(
    path: Path, tensors: Mapping[str, Lazy], metadata: Mapping[str, str], progress: Progress = lambda count: None
) -> int:
    """Write `tensors` to `path`, and sync the file to the disk; returns the number of the tensors' bytes.

    Raises:
        CheckpointError: a tensor can't be read or written.
    """
    head = header(tensors, metadata)
    total = sum(numel(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    try:
        with open_sink(path, len(head) + total) as sink:
            sink.write(memoryview(head))
            for tensor in tensors.values():
                write_tensor(sink.write, tensor, progress)
            sink.finish()
    except OSError as error:
        raise CheckpointError(f"{path} can't be written: {error}") from error
    return total


def write_tensor(write: Callable[[memoryview], object], tensor: Lazy, progress: Progress = lambda count: None) -> int:
    """Write a tensor's bytes, in row-major order, by calls of `write`; returns their number."""
    total = 0
    for chunk in chunks(tensor):
        data = chunk.contiguous().view(torch.uint8).numpy().data
        write(data)
        total += len(data)
        progress(len(data))
    return total
