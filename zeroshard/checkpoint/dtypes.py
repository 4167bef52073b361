"""Names of dtypes as safetensors writes them."""

from __future__ import annotations

import torch

from zeroshard.errors import CheckpointError

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def name_of(dtype: torch.dtype, what: str) -> str:
    """The name of a dtype. Raises CheckpointError, naming the tensor `what`, for one that safetensors can't hold."""
    if dtype not in _NAMES:
        raise CheckpointError(f"tensor {what!r} is {dtype}, which a checkpoint can't hold; convert it before saving")
    return _NAMES[dtype]


def dtype_of(name: object) -> torch.dtype | None:
    """The dtype of a name; None for other values."""
    return _DTYPES.get(name) if isinstance(name, str) else None
