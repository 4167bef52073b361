"""Adam by DeepSpeed's names, as classes. In an engine the plan chooses the kernel, whichever of them it gets."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from deepspeed._exports import lazy
from deepspeed.ops.adam.subgroups import SubgroupSteps
from zeroshard.errors import PlanError, ZeroShardWarning
from zeroshard.optim.clients import torch_source
from zeroshard.optim.own_optimizers import UnshardedOptimizer
from zeroshard.optim.sources import Source

__getattr__, __dir__ = lazy(__name__, {})


class DeepSpeedCPUAdam(SubgroupSteps):
    """`zeroshard.CPUAdam`: Adam, or AdamW with `adamw_mode`, by the native kernel where it steps alone.

    With `fp32_optimizer_states=False` it keeps the moments of bfloat16 parameters in bfloat16 where it steps alone. In
    an engine the config says so (`bf16_optimizer_states` of the section bf16), and a warning tells of it.

    Raises:
        ValueError: amsgrad, which neither this kernel nor DeepSpeed's has; 16-bit states of float16 parameters, or of
            parameters of several dtypes.
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
        dtypes = {parameter.dtype for group in self.param_groups for parameter in group["params"]}
        if fp32_optimizer_states or dtypes == {torch.float32}:
            return
        if dtypes != {torch.bfloat16}:
            raise ValueError(
                f"DeepSpeedCPUAdam(fp32_optimizer_states=False) with parameters of {sorted(map(str, dtypes))}: states "
                "are float32 or bfloat16 here; leave it out, or have all parameters in bfloat16"
            )
        self._moments = torch.bfloat16

    def source(self) -> Source:
        """What it becomes when it is sharded: Adam or AdamW with the state that the config asks for."""
        if self._moments != torch.float32:
            warnings.warn(
                "DeepSpeedCPUAdam(fp32_optimizer_states=False): in an engine the config decides on the optimizer's "
                "states, which are float32 unless it says bf16.bf16_optimizer_states",
                ZeroShardWarning,
                stacklevel=2,
            )
        self._moments = torch.float32
        return super().source()


class FusedAdam(torch.optim.Adam, UnshardedOptimizer):
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
