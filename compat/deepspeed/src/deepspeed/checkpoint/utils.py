"""Copies of nested tensors for saving."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed._exports import lazy
from zeroshard.engine.memory.guard import ShardedValue
from zeroshard.engine.outside_step.gathered import GatheredParameters
from zeroshard.sharding.dtensors import as_dtensor, holder_of

__getattr__, __dir__ = lazy(__name__, {})


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with every tensor in it (in dicts, lists and tuples) as a detached copy of its own on `device`.

    A view would save the whole buffer that it looks into. What is twice in `item`, tied weights say, is copied once.
    Weights that rest in fp8 are copied in compute dtype, of their master weights, and a DTensor as the whole tensor;
    all ranks call this then.
    """
    return _cloned(item, device, {})


def _cloned(item: Any, device: torch.device | str, done: dict[tuple[object, ...], torch.Tensor]) -> Any:
    if isinstance(item, ShardedValue) and item.coded is not None:
        with GatheredParameters([item.coded]):
            return item.coded.detach().to(device, copy=True)
    if isinstance(item, torch.Tensor):
        held, dtensor = holder_of(item), as_dtensor(item)  # a DTensor itself has no address
        key = (held.device, held.data_ptr(), item.dtype, item.shape, item.stride())
        if key not in done or not item.numel():
            moved = (item if dtensor is None else dtensor.full_tensor()).detach().to(device)
            done[key] = moved.clone() if moved.data_ptr() == held.data_ptr() else moved
        return done[key]
    if isinstance(item, (list, tuple)):
        return type(item)(_cloned(member, device, done) for member in item)
    if isinstance(item, Mapping):
        copied = {key: _cloned(value, device, done) for key, value in item.items()}
        return OrderedDict(copied) if isinstance(item, OrderedDict) else copied
    return item
