"""Adagrad by DeepSpeed's name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {})


def DeepSpeedCPUAdagrad(
    model_params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, **_: Any
) -> torch.optim.Optimizer:
    """torch's Adagrad; accelerate hands every CPU optimizer `adamw_mode`, which means nothing here."""
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
