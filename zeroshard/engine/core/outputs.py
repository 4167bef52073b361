"""Finds the tensors in a module's output; the engine hooks their gradients to notice the backward of the module.

Rejected: torch's pytree, which does not look into unregistered classes, and models return classes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from zeroshard.engine.memory.unit import Unit
from zeroshard.errors import UsageError


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """All tensors in a module's output: nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:  # type: ignore[attr-defined]
            yield from tensors_in(getattr(value, name))
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (type, nn.Module)):
        for item in vars(value).values():  # a user's output class; attributes of its members are not searched
            if isinstance(item, (torch.Tensor, tuple, list, Mapping)):
                yield from tensors_in(item)


def refuse_no_tensor(unit: Unit, output: object) -> None:
    """Raises UsageError if the output has no tensor, since the engine could not notice the unit's backward."""
    needed = unit.plan.sharded and any(True for _ in unit.trainable)
    if needed and next(tensors_in(output), None) is None:
        raise UsageError(
            f"unit {unit.label!r} returned no tensor (a {type(output).__name__}), so its backward can't be seen, and "
            "its parameters would not be there: return what the loss is made of (tensors, or tuples, lists, mappings, "
            "objects of them), or run the model under torch.no_grad()"
        )
