"""deepspeed.runtime: the engine's parts."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "activation_checkpointing": "deepspeed.runtime.activation_checkpointing",
        "base_optimizer": "deepspeed.runtime.base_optimizer",
        "config": "deepspeed.runtime.config",
        "constants": "deepspeed.runtime.constants",
        "dataloader": "deepspeed.runtime.dataloader",
        "engine": "deepspeed.runtime.engine",
        "lr_schedules": "deepspeed.runtime.lr_schedules",
        "pipe": "deepspeed.runtime.pipe",
        "sequence_parallel": "deepspeed.runtime.sequence_parallel",
        "swap_tensor": "deepspeed.runtime.swap_tensor",
        "utils": "deepspeed.runtime.utils",
        "zero": "deepspeed.runtime.zero",
        "DeepSpeedOptimizer": "deepspeed.runtime.base_optimizer:DeepSpeedOptimizer",
        "ZeROOptimizer": "deepspeed.runtime.base_optimizer:ZeROOptimizer",
    },
)
