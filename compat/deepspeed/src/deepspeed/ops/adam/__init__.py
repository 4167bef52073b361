"""Adam by DeepSpeed's names, as classes. In an engine the plan chooses the kernel, whichever of them it gets."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from deepspeed._exports import lazy
from zeroshard.errors import PlanError
from zeroshard.optim.adam.host_adam import CPUAdam
from zeroshard.optim.clients import torch_source
from zeroshard.optim.named import SourcedOptimizer
from zeroshard.optim.sources import Source

__getattr__, __dir__ = lazy(__name__, {})


class DeepSpeedCPUAdam(CPUAdam):
    """`zeroshard.CPUAdam`: Adam, or AdamW with `adamw_mode`, by the native kernel where it steps alone.

    The state is float32 in any case.

    Raises:
        ValueError: amsgrad, which neither this kernel nor DeepSpeed's has.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise ValueError("DeepSpeedCPUAdam(amsgrad=True): it has no amsgrad; use torch.optim.AdamW(amsgrad=True)")
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, adamw_mode)


class FusedAdam(torch.optim.Adam, SourcedOptimizer):
    """torch's Adam, or AdamW with `adam_w_mode`.

    Raises:
        ValueError: without bias correction, which has no counterpart.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ValueError("FusedAdam(bias_correction=False) has no counterpart here; use DeepSpeedCPUAdam")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad=amsgrad, decoupled_weight_decay=adam_w_mode)

    def source(self) -> Source:
        """What it becomes when it is sharded. Raises PlanError where a subclass has a step of its own."""
        if inspect.unwrap(type(self).step) is not inspect.unwrap(torch.optim.Adam.step):  # torch wraps it by class
            raise PlanError(
                f"{type(self).__name__} overrides step(), which would not run on sharded state; derive it from "
                "torch.optim.Optimizer, and allow it with zero_allow_untested_optimizer"
            )
        decoupled = bool(self.param_groups[0]["decoupled_weight_decay"])
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        return torch_source(self, allow_untested=False, kind=kind)
