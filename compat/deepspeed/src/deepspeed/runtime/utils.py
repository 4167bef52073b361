"""Small helpers that scripts take from DeepSpeed: memory in use, partitions, seeds, moving nested tensors."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import graph

from deepspeed._exports import lazy
from zeroshard.errors import UsageError

__getattr__, __dir__ = lazy(
    __name__,
    {
        "see_memory_usage": "zeroshard:see_memory_usage",
        "memory_status": "zeroshard:memory_status",
    },
)


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """A call as Python writes it: `name(1, 'a', key=2)`."""
    arguments = [repr(value) for value in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join(arguments)})"


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: None = None
) -> torch.Tensor:
    """torch's, for models without an engine; an engine clips by `gradient_clipping` of its config.

    Raises:
        UsageError: for a model-parallel group, of which there is none here.
    """
    if mpu is not None:
        raise UsageError("clip_grad_norm_(mpu=...): model parallelism is not built yet; leave mpu out")
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def count_used_parameters_in_backward(parameters: Iterable[torch.Tensor]) -> int:
    """To how many of the parameters the backward that is running gives a gradient. For hooks of that backward."""
    with torch.enable_grad():  # a parameter's node is made by a view of it, where it has none yet
        nodes = [graph.get_gradient_edge(parameter).node for parameter in parameters if parameter.requires_grad]
    return sum(torch._C._will_engine_execute_node(node) for node in nodes)


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Make the directory in which a file is to be written."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool]) -> Any:
    """A copy of nested lists, tuples and dicts with copies on `device` of what `criterion_func` holds for."""
    return _mapped(item, lambda value: value.clone().detach().to(device) if criterion_func(value) else value)


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] = torch.is_tensor
) -> Any:
    """The same, without a copy of what is on `device` already."""
    return _mapped(item, lambda value: value.to(device) if criterion_func(value) else value)


def _mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, (list, tuple)):
        return type(item)([_mapped(member, change) for member in item])
    if isinstance(item, Mapping):
        return {key: _mapped(value, change) for key, value in item.items()}
    return change(item)


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """The sums of the first weight, the first two, and so on."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Where `num_parts` parts of `num_items` items begin, and where the last one ends; sizes differ by at most one."""
    share, more = divmod(num_items, num_parts)
    return [part * share + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Where parts of successive items begin so that the heaviest part is as light as can be, and where the last ends.

    Every part has an item where there are enough of them.
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0, *accumulate(weights)]
    # best[p][i]: the least possible weight of the heaviest of p parts of the first i items, and where the last begins.
    best = [(sums[i], 0) for i in range(count + 1)]
    begins: list[list[int]] = []
    for parts in range(2, num_parts + 1):
        row = [
            min(((max(best[j][0], sums[i] - sums[j]), j) for j in range(parts - 1, i)), default=(best[i][0], i))
            for i in range(count + 1)
        ]
        begins.append([begin for _, begin in row])
        best = row
    ends = [count]
    for row_begins in reversed(begins):
        ends.append(row_begins[ends[-1]])
    return [0, *reversed(ends)]
