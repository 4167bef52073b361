"""Client state with small tensors in it, which Lightning's callbacks have, as JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_TENSOR = "__tensor__"
_LARGEST = 4096


def plain(value: Any) -> Any:
    """Tensors of up to 4096 elements as lists that say their dtype; larger ones stay, and are refused when saved."""
    if isinstance(value, torch.Tensor) and value.numel() <= _LARGEST:
        return {_TENSOR: str(value.dtype).removeprefix("torch."), "values": value.detach().cpu().tolist()}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


def restored(value: Any) -> Any:
    """What `plain` was given, with tensors on the CPU."""
    if isinstance(value, dict) and value.keys() == {_TENSOR, "values"}:
        return torch.tensor(value["values"], dtype=getattr(torch, value[_TENSOR]))
    if isinstance(value, dict):
        return {key: restored(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(restored(item) for item in value)
    return value
