"""Lion by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import zeroshard
from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {})


def DeepSpeedCPULion(
    model_params: Iterable[Any],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    **_: Any,
) -> torch.optim.Optimizer:
    """zeroshard's Lion; accelerate hands every CPU optimizer `adamw_mode`, which means nothing here."""
    return zeroshard.Lion(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


def FusedLion(
    params: Iterable[Any],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """zeroshard's Lion, by DeepSpeed's default of the second beta."""
    return zeroshard.Lion(params, lr=lr, betas=betas, weight_decay=weight_decay)
