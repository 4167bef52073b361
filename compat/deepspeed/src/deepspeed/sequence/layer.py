"""Attention over divided sequences for models with attention of their own."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__, {"DistributedAttention": "zeroshard.parallel.distributed_attention:DistributedAttention"}
)
