"""Finds the tensors in what a module returns, whose gradients tell when the backward comes to the module.

Rejected: torch's pytree. It does not look into classes that nobody registered, and models return their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn


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
        for item in vars(value).values():  # an output class of the user's own; not what hangs on its members
            if isinstance(item, (torch.Tensor, tuple, list, Mapping)):
                yield from tensors_in(item)
