"""Replaces parameters in optimizers and parameter groups after a model has been divided over a model axis.

Dividing makes a new DTensor object from a plain parameter, so optimizers and lists of parameters that were made before
need the new objects. Rejected: to demand that the optimizer is made after dividing. It is the config that says how to
divide, and scripts make their optimizer before they call `initialize`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def replace_members(groups: Iterable[Any], members: Mapping[int, nn.Parameter]) -> list[Any]:
    """A copy of a list of parameters or parameter groups, with parameters replaced.

    Args:
        members: the new parameters, by the id of the parameter that each replaces.
    """

    def replaced(items: Any) -> Any:
        if isinstance(items, dict):
            return {**items, "params": replaced(items["params"])} if "params" in items else items
        if isinstance(items, (list, tuple)):
            return [replaced(item) for item in items]
        return members.get(id(items), items)

    return [replaced(item) for item in groups]


def replace_in_optimizer(optimizer: object, members: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters in an optimizer's groups; a callable that makes an optimizer is left as it is."""
    if members and isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = replace_members(group["params"], members)
