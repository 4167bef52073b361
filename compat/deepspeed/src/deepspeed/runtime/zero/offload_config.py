"""The names by which scripts say what `engine.offload_states` moves, and where to."""

from __future__ import annotations

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
