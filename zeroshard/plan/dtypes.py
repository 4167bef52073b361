"""Converts between torch's dtypes and their names in plans and configs. Names keep a plan printable and JSON-exact."""

from __future__ import annotations

import torch

from zeroshard.errors import PlanError

_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "half": "float16"}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
}
LOW_PRECISION = ("bfloat16", "float16")
"""Compute dtypes whose parameters have master weights, unless the recipe says that they are updated themselves."""
_PACKED = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bool, torch.complex64, torch.float8_e8m0fnu),
    )
}
"""Dtypes of frozen parameters that are kept, sent and saved as they are: of packed, whole and complex numbers."""
_STORED = {**_DTYPES, **_PACKED}
"""All dtypes that are stored or sent, with those of the remainder of split master weights and of codes."""


def dtype_name(dtype: torch.dtype | str) -> str:
    """The plan's name of a dtype ('float32', 'bfloat16', ...); short forms such as 'bf16' are accepted."""
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in _DTYPES:
        raise PlanError(f"dtype {dtype!s} can't be sharded; use one of {', '.join(_DTYPES)}")
    return name


def name_of(dtype: torch.dtype | str | None) -> str | None:
    """The plan's name of a torch dtype; a name, and None, as they are."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def packed_name(dtype: torch.dtype) -> str | None:
    """The plan's name of a dtype of packed or whole numbers; None for another."""
    name = str(dtype).removeprefix("torch.")
    return name if name in _PACKED else None


def is_packed(name: str) -> bool:
    """Whether a dtype's values are packed or whole numbers, which nothing computes with as they are."""
    return name in _PACKED


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a plan's dtype name."""
    return _STORED[name]


def state_dtype(name: str) -> str:
    """The dtype of master weights, moments and accumulated gradients of parameters in dtype `name`."""
    return "float64" if name == "float64" else "float32"


def itemsize(name: str) -> int:
    """Bytes per element."""
    return _STORED[name].itemsize
