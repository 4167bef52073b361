"""Adam by DeepSpeed's names. The plan chooses the kernel, so these are torch's optimizers with the arguments sorted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {})


def DeepSpeedCPUAdam(
    model_params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """Adam, or AdamW with `adamw_mode`. The state is float32 in any case.

    Raises:
        ValueError: without bias correction, which has no counterpart.
    """
    if not bias_correction:
        raise ValueError("DeepSpeedCPUAdam(bias_correction=False) has no counterpart in zeroshard; leave it on")
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    return kind(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def FusedAdam(
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """As DeepSpeedCPUAdam."""
    return DeepSpeedCPUAdam(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
