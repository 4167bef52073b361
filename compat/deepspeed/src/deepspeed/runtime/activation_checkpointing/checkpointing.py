"""deepspeed.checkpointing: zeroshard's activation checkpointing of calls, which has DeepSpeed's arguments."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        **{name: f"zeroshard.checkpointing:{name}" for name in ("checkpoint", "configure", "is_configured", "reset")},
        "non_reentrant_checkpoint": "zeroshard.checkpointing:checkpoint",
    },
)
