"""Optimizers by DeepSpeed's names."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "adam": "deepspeed.ops.adam",
        "adagrad": "deepspeed.ops.adagrad",
        "lion": "deepspeed.ops.lion",
        "lamb": "deepspeed.ops.lamb",
    },
)
