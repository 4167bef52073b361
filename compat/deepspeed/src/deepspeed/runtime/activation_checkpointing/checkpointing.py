"""deepspeed.checkpointing: torch's activation checkpointing. There is nothing to configure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from deepspeed._exports import lazy
from zeroshard.errors import UsageError

__getattr__, __dir__ = lazy(__name__, {})


def configure(
    mpu_: object = None,
    deepspeed_config: object = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accept the settings that ask for nothing. Raises UsageError for those that do."""
    asked = {
        "mpu_": mpu_,
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
    }
    for name, value in asked.items():
        if value:
            raise UsageError(f"deepspeed.checkpointing.configure({name}=...) is not built yet; leave it off")


def is_configured() -> bool:
    """Always: nothing needs to be configured."""
    return True


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` now and again in the backward, instead of keeping what is in between."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)
