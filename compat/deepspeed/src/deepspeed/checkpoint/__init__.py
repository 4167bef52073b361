"""Tools around checkpoints."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "utils": "deepspeed.checkpoint.utils",
    },
)
