"""Parameter groups of models that may have experts: without any, the groups stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed._exports import lazy
from zeroshard.errors import UsageError

__getattr__, __dir__ = lazy(__name__, {})


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether DeepSpeed's MoE layer has marked a parameter as one rank's own: its attribute `allreduce` is False."""
    return vars(param).get("allreduce", True) is False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: int | float = 178956971
) -> list[dict[str, Any]]:
    """The groups as a list. Where ranks have experts of their own, DeepSpeed puts these into further groups.

    Raises:
        UsageError: a parameter is one rank's own.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    own = sum(is_moe_param(member) for group in groups for member in group["params"])
    if own:
        raise UsageError(
            f"{own} parameters are marked as one rank's own (allreduce=False), for expert parallelism, which is not "
            "built yet; zeroshard shards all parameters over all ranks: leave the marks out"
        )
    return groups
