"""`get_model_profile`, and the profiler that a script puts around its own forwards."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "FlopsProfiler": "deepspeed.profiling.flops_profiler.profiler:FlopsProfiler",
        "get_model_profile": "zeroshard:get_model_profile",
    },
)
