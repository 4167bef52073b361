"""The names by which scripts say what is offloaded, what `engine.offload_states` moves, and where to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class OffloadDeviceEnum(str, Enum):
    """Where state may rest; `offload_states` of zeroshard knows the processor's memory only."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """What may be moved."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


@dataclass
class DeepSpeedZeroOffloadParamConfig:
    """The section offload_param; buffers are without effect, see the reference of the config."""

    device: str = "none"
    nvme_path: str | None = None
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    pin_memory: bool = True


@dataclass
class DeepSpeedZeroOffloadOptimizerConfig:
    """The section offload_optimizer; buffers are without effect, see the reference of the config."""

    device: str = "none"
    nvme_path: str | None = None
    buffer_count: int = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: float = 0.8

    @property
    def pipeline(self) -> bool:
        """Whether either way of the state is pipelined."""
        return self.pipeline_read or self.pipeline_write
