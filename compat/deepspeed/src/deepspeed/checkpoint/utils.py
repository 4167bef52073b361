"""Copies of nested tensors for saving."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {})


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with every tensor in it (in dicts, lists and tuples) as a detached copy of its own on `device`.

    A view would save the whole buffer that it looks into.
    """
    if isinstance(item, torch.Tensor):
        moved = item.detach().to(device)
        return moved.clone() if moved.data_ptr() == item.data_ptr() else moved
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(member, device) for member in item)
    if isinstance(item, Mapping):
        copied = {key: clone_tensors_for_torch_save(value, device) for key, value in item.items()}
        return OrderedDict(copied) if isinstance(item, OrderedDict) else copied
    return item
