"""Sequences that are divided over ranks."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "parallel_state_sp": "deepspeed.runtime.sequence_parallel.parallel_state_sp",
        "ulysses_sp": "deepspeed.runtime.sequence_parallel.ulysses_sp",
    },
)
