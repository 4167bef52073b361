"""Optimizers by DeepSpeed's names, and which of its operators have a counterpart."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "__compatible_ops__": "deepspeed.ops.op_builder:COMPATIBLE",
        "adam": "deepspeed.ops.adam",
        "aio": "deepspeed.ops.aio",
        "adagrad": "deepspeed.ops.adagrad",
        "lion": "deepspeed.ops.lion",
        "lamb": "deepspeed.ops.lamb",
        "op_builder": "deepspeed.ops.op_builder",
    },
)
