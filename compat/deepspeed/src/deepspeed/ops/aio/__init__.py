"""Whether there is offload to NVMe, asked in DeepSpeed's words."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {"AsyncIOBuilder": "deepspeed.ops.op_builder:AsyncIOBuilder"})
