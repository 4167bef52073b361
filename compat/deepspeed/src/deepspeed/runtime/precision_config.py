"""The sections fp16 and bf16 as pydantic models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator

from deepspeed._exports import lazy
from deepspeed.runtime.config_utils import DeepSpeedConfigModel

__getattr__, __dir__ = lazy(__name__, {})


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The section bf16."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The section fp16. What concerns the dynamic scale is checked where there is one."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: float = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1
    fp16_master_weights_and_grads: bool = False

    @field_validator("loss_scale", mode="before")
    @classmethod
    def _finite_scale(cls, value: Any) -> float:
        number = _number(value)
        if number < 0:
            raise ValueError(f"must be a number of at least 0, not {value!r}; 0 is a dynamic scale")
        return number

    @field_validator("loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _finite(cls, value: Any) -> float:
        return _number(value)

    @model_validator(mode="after")
    def _dynamic(self) -> DeepSpeedFP16Config:
        if self.enabled and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                if getattr(self, name) <= 0:
                    raise ValueError(f"{name} must be above 0 where the loss scale is dynamic")
        return self


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"must be a number, not {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"must be a number that is finite, not {value!r}")
    return number


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section bf16 of a config that was read, also under its older name bfloat16; the defaults without one."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The section fp16 of a config that was read; the defaults without one."""
    return DeepSpeedFP16Config(**(param_dict.get("fp16") or {}))
