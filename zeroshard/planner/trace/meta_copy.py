"""Copies a model and a batch to the meta device: the same modules and shapes without memory, also of a sharded model.

`copy.deepcopy` finds a meta tensor for each parameter and buffer in its memo, so tied ones stay tied and nothing is
read. Rejected: `copy.deepcopy(model).to("meta")`, which holds the model twice for a while.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zeroshard.errors import PlanError


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` on the meta device, in training mode. Raises PlanError for a module that can't be copied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        held = [*vars(module).values(), *module._parameters.values(), *module._buffers.values()]
        for tensor in held:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _shape_of(tensor)
    try:
        return copy.deepcopy(model, memo).train()
    except (TypeError, RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
        raise PlanError(f"{type(model).__name__} can't be copied to be traced: {error}") from error


def meta_batch(batch: Any) -> Any:
    """The same nested containers with a meta tensor for each tensor."""
    return tree_map(lambda leaf: _shape_of(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)


def shortened(batch: Any, samples: int, wanted: int) -> Any:
    """The same batch with fewer samples: tensors whose first dim has size `samples` are cut to `wanted`."""

    def cut(leaf: Any) -> Any:
        return leaf[:wanted] if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == samples else leaf

    return tree_map(cut, batch)


def samples_in(batch: Any) -> int:
    """The size of the first dim that most tensors of a batch share; 1 for a batch without tensors."""
    found = [leaf.shape[0] for leaf in tensors_of(batch) if leaf.dim()]
    return max(set(found), key=found.count) if found else 1


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in lists, tuples and mappings."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in tensors_of(value)]
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return [tensor for value in batch for tensor in tensors_of(value)]
    return []


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same shape, strides and dtype; a parameter for a parameter."""
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(empty, tensor.requires_grad)
        for name, value in vars(tensor).items():
            if not name.startswith("_zeroshard"):
                setattr(made, name, value)
        return made
    return empty
