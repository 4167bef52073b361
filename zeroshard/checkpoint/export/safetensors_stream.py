"""Write a safetensors file without having its tensors in memory.

    | length of header: 8 bytes | header: JSON, name -> dtype, shape, bytes | padding | tensor | tensor | ...

The header needs shapes and dtypes only, so it is written first and the tensors follow, a chunk at a time. Rejected:
`safetensors.torch.save_file`, which wants all tensors of a file at once.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from zeroshard.checkpoint.foreign.stored import Lazy, chunks, numel
from zeroshard.errors import CheckpointError

Progress = Callable[[int], None]  # bytes written since the last call
_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def header(tensors: Mapping[str, Lazy], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file of `tensors` in this order. Raises CheckpointError for a dtype it can't hold."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        dtype = _NAMES.get(tensor.dtype)
        if dtype is None:
            raise CheckpointError(f"tensor {name!r} is {tensor.dtype}, which safetensors can't hold")
        size = numel(tensor.shape) * tensor.dtype.itemsize
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write(
    path: Path, tensors: Mapping[str, Lazy], metadata: Mapping[str, str], progress: Progress = lambda count: None
) -> int:
    """Write `tensors` to `path`, synced to the disk; returns the bytes of their content.

    Raises:
        CheckpointError: a tensor can't be read or written.
    """
    total = 0
    try:
        with path.open("xb") as file:
            file.write(header(tensors, metadata))
            for tensor in tensors.values():
                total += write_tensor(file, tensor, progress)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} can't be written: {error}") from error
    return total


def write_tensor(file: BinaryIO, tensor: Lazy, progress: Progress = lambda count: None) -> int:
    """Append a tensor's bytes, row-major; returns how many."""
    total = 0
    for chunk in chunks(tensor):
        data = chunk.contiguous().view(torch.uint8).numpy().data
        file.write(data)
        total += len(data)
        progress(len(data))
    return total
