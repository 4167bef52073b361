"""What memory is in use."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "see_memory_usage": "zeroshard:see_memory_usage",
        "memory_status": "zeroshard:memory_status",
    },
)
