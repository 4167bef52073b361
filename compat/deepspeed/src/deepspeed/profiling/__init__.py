"""deepspeed.profiling: the FLOPs of a model."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {"flops_profiler": "deepspeed.profiling.flops_profiler"})
