"""Expert parallelism, which is not built: a model's own experts are gathered with their block."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {"utils": "deepspeed.moe.utils"})
