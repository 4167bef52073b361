"""Adam by DeepSpeed's names. In an engine the plan chooses the kernel, whichever of them it gets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed._exports import lazy
from zeroshard.optim.cpu_adam import CPUAdam

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
    """`zeroshard.CPUAdam`: Adam, or AdamW with `adamw_mode`, by the native kernel where it steps alone.

    The state is float32 in any case. With `amsgrad`, which the kernel has not, it is torch's.

    Raises:
        ValueError: amsgrad without bias correction, which has no counterpart.
    """
    if amsgrad:
        return _torchs(model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode)
    return CPUAdam(model_params, lr, bias_correction, betas, eps, weight_decay, adamw_mode)


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
    """torch's Adam, or AdamW with `adam_w_mode`.

    Raises:
        ValueError: without bias correction, which has no counterpart.
    """
    return _torchs(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


def _torchs(
    params: Iterable[Any],
    lr: float,
    bias_correction: bool,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    decoupled: bool,
) -> torch.optim.Optimizer:
    if not bias_correction:
        raise ValueError("bias_correction=False has no counterpart in torch's Adam; leave it on, or amsgrad off")
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
