"""Which parameters are experts', and parameter groups in which they stand apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed._exports import lazy
from deepspeed.moe.layer import MoE

__getattr__, __dir__ = lazy(__name__, {})


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Whether a model has such layers, and the experts of the first one."""
    found = next((one for one in module.modules() if isinstance(one, MoE)), None)
    return (False, 0) if found is None else (True, found.num_experts)


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is one of experts: its attribute `allreduce` is False."""
    return vars(param).get("allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a group is one of experts' parameters."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: int | float | None = 178956971
) -> list[dict[str, Any]]:
    """The groups without experts' parameters, and behind them these in groups of their own, with the same options.

    Args:
        max_group_size: elements from which on a group of experts' parameters is several; None is any number.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    dense: list[dict[str, Any]] = []
    apart: list[dict[str, Any]] = []
    for group in groups:
        members = list(group["params"])
        if not any(is_moe_param(one) for one in members):
            dense.append(group)
            continue
        dense.append({**group, "params": [one for one in members if not is_moe_param(one)]})
        names = dict.fromkeys(vars(one).get("group_name", "") for one in members if is_moe_param(one))
        for name in names:
            own = [one for one in members if is_moe_param(one) and vars(one).get("group_name", "") == name]
            apart += [{**group, "params": part, "name": name, "moe": True} for part in _parts(own, max_group_size)]
    return [*dense, *apart]


def split_params_grads_into_shared_and_expert_params(
    group: Sequence[nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of parameters that all ranks have, and those of experts'."""
    grads = [(one.grad, is_moe_param(one)) for one in group if one.grad is not None]
    return [grad for grad, own in grads if not own], [grad for grad, own in grads if own]


def _parts(members: list[torch.Tensor], most: int | float | None) -> Iterator[list[torch.Tensor]]:
    part: list[torch.Tensor] = []
    for member in members:
        if part and most is not None and sum(one.numel() for one in part) + member.numel() > most:
            yield part
            part = []
        part.append(member)
    if part:
        yield part
