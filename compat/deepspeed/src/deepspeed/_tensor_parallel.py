"""deepspeed.tp_model_init: a model divided over neighbouring ranks before `initialize`, by the plan that it brings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import zeroshard
from zeroshard.engine.build import default_device
from zeroshard.errors import UsageError
from zeroshard.tensor_division import divide_by_plan


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **options: Any) -> nn.Module:
    """Divide `model` over `tp_size` ranks; called by all ranks. The model is changed in place and returned.

    Args:
        dtype: that the model gets.
        config: its `partition_config`, or that of its `tensor_parallel`, names the layers to divide, in place of the
            model's own plan.

    Raises:
        PlanError: what can't be divided, with the numbers.
    """
    if options:
        raise UsageError(f"deepspeed.tp_model_init: {sorted(options)[0]!r} is not built; name the layers in config")
    zeroshard.init_distributed()
    partition = _partition(config)
    model.to(dtype)
    if tp_size > 1:
        divide_by_plan(model, tp_size, default_device().type, partition)
    return model


def _partition(config: Any) -> Mapping[str, Any] | None:
    """`partition_config` of a section, or of the whole config, which transformers gives."""
    section: Any = config.get("tensor_parallel", config) if isinstance(config, Mapping) else None
    found = section.get("partition_config") if isinstance(section, Mapping) else None
    return found if isinstance(found, Mapping) else None
