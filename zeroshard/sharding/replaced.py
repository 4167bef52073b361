"""Parameters in the place of others: what a caller holds of a model, after the model has been divided.

A parameter that a model divides is a DTensor, and another object than the plain one before. Optimizers and lists of
parameters that were made before get the new ones. Rejected: to let the caller divide first and make the optimizer
afterwards, for a config says how to divide, and scripts make their optimizer before they hand both over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def replace_members(groups: Iterable[Any], members: Mapping[int, nn.Parameter]) -> list[Any]:
    """Parameters, or groups of them as dicts, with those of `members` in the place of the ones with their id."""

    def replaced(items: Any) -> Any:
        if isinstance(items, dict):
            return {**items, "params": replaced(items["params"])} if "params" in items else items
        if isinstance(items, (list, tuple)):
            return [replaced(item) for item in items]
        return members.get(id(items), items)

    return [replaced(item) for item in groups]


def replace_in_optimizer(optimizer: object, members: Mapping[int, nn.Parameter]) -> None:
    """The same in the groups of an optimizer; what makes one when it is called has no parameters yet."""
    if members and isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = replace_members(group["params"], members)
