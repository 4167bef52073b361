"""Reads of single parameters as DeepSpeed answers them: None for what nothing trains.

zeroshard's own functions give the values of frozen parameters too. DeepSpeed keeps no float32 copy of those and gives
None, and scripts tell frozen parameters by it.
"""

from __future__ import annotations

import torch

import zeroshard
from zeroshard.engine.between.gathered import place_of


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """As `zeroshard.safe_get_full_fp32_param`; None for a frozen parameter."""
    return None if _frozen(param) else zeroshard.safe_get_full_fp32_param(param)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """As `zeroshard.safe_get_local_fp32_param`; None for a frozen parameter."""
    return None if _frozen(param) else zeroshard.safe_get_local_fp32_param(param)


def _frozen(param: object) -> bool:
    """Whether the tensor is a parameter of a sharded model that nothing trains."""
    place = place_of(param) if isinstance(param, torch.Tensor) else None
    return place is not None and not place[2].plan.trainable
