"""Layers that are a mixture of experts, and what tells experts' parameters apart."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "layer": "deepspeed.moe.layer",
        "sharded_moe": "deepspeed.moe.sharded_moe",
        "utils": "deepspeed.moe.utils",
    },
)
