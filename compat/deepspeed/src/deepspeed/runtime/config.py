"""A config that is read and checked before there is a model, in DeepSpeed's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from deepspeed import _config
from deepspeed._exports import lazy
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT, LOG_LEVEL_DEFAULT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from zeroshard.config import load_config
from zeroshard.errors import ConfigError

DeepSpeedConfigError = ConfigError

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, LION_OPTIMIZER = "adam", "adamw", "lamb", "lion"
ADAGRAD_OPTIMIZER, MUON_OPTIMIZER = "adagrad", "muon"
ONEBIT_ADAM_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER = "onebitadam", "zerooneadam"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"

__getattr__, __dir__ = lazy(__name__, {})


def get_log_level(config: Mapping[str, Any]) -> Any:
    """The value of `log_level` in a config that was read; None where it is not given."""
    return config.get("log_level", LOG_LEVEL_DEFAULT)


def get_gradient_clipping(config: Mapping[str, Any]) -> Any:
    """The value of `gradient_clipping` in a config that was read; the default where it is not given."""
    return config.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT)


class DeepSpeedConfig:
    """A config in which every value is filled in, for as many ranks as there are now.

    Attributes:
        zero_config: the section zero_optimization.
        monitor_config: what `deepspeed.monitor.monitor.MonitorMaster` takes.
        zero_enabled, zero_optimization_stage: what of it is asked for most.
        optimizer_name, optimizer_params, scheduler_name, scheduler_params: None where the section is not there.

    Raises:
        DeepSpeedConfigError: what can't be obeyed.
    """

    def __init__(self, config: Any, mpu: None = None, mesh_device: None = None) -> None:
        document = _config.read(config)
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        resolved = load_config(_config.understood(document.root, optimizer=True), world_size=world)
        self.world_size = world
        self.train_batch_size = resolved.batch.train
        self.train_micro_batch_size_per_gpu = resolved.batch.micro
        self.gradient_accumulation_steps = resolved.batch.accumulation
        self.gradient_clipping = resolved.gradient_clipping
        self.gradient_allreduce_op = resolved.reduction.op
        self.prescale_gradients = resolved.reduction.prescale
        self.gradient_predivide_factor = resolved.reduction.predivide_factor
        self.monitor_config = resolved.observe
        self.wall_clock_breakdown = resolved.observe.breakdown
        self.steps_per_print = resolved.steps_per_print
        self.bfloat16_enabled = resolved.precision.compute == "bf16"
        self.float16_enabled = self.fp16_enabled = resolved.precision.compute == "fp16"
        self.loss_scale = (
            0.0 if resolved.loss_scale is None or resolved.loss_scale.dynamic else resolved.loss_scale.initial
        )
        self.zero_config = DeepSpeedZeroConfig(**(document.root.get("zero_optimization") or {}))
        self.zero_optimization_stage = resolved.zero.stage
        self.zero_enabled = resolved.zero.stage != 0
        optimizer, scheduler = resolved.optimizer, resolved.scheduler
        self.optimizer_name = None if optimizer is None else optimizer.type.lower()
        self.optimizer_params = None if optimizer is None else dict(optimizer.params)
        self.scheduler_name = None if scheduler is None else scheduler.type
        self.scheduler_params = None if scheduler is None else dict(scheduler.params)
