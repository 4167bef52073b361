"""The size from which DeepSpeed swaps a tensor to NVMe, by which scripts size tensors; zeroshard moves windows."""

from __future__ import annotations

from deepspeed._exports import lazy

MIN_SWAPPABLE_BYTES = 1024**2

__getattr__, __dir__ = lazy(__name__, {})
