"""Dtypes as plans and configs name them, and as torch knows them. Names keep a plan printable and JSON-exact."""

from __future__ import annotations

import torch

from zeroshard.errors import PlanError

_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "half": "float16"}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
}


_STORED = {**_DTYPES, "int16": torch.int16, "uint8": torch.uint8}
"""Dtypes of what is stored or sent: also the remainder of split master weights, and records of codes."""


def dtype_name(dtype: torch.dtype | str) -> str:
    """The plan's name of a dtype ('float32', 'bfloat16', ...); short forms such as 'bf16' are accepted."""
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in _DTYPES:
        raise PlanError(f"dtype {dtype!s} can't be sharded; use one of {', '.join(_DTYPES)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a plan's dtype name."""
    return _STORED[name]


def state_dtype(name: str) -> str:
    """The dtype of master weights, moments and accumulated gradients of parameters in dtype `name`."""
    return "float64" if name == "float64" else "float32"


def itemsize(name: str) -> int:
    """Bytes per element."""
    return _STORED[name].itemsize
