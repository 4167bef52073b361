"""Tools around checkpoints."""

from __future__ import annotations

from deepspeed._exports import lazy

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
"""A key of `client_state` under which scripts describe their model; it is kept as any other."""

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ds_to_universal": "deepspeed.checkpoint.ds_to_universal",
        "utils": "deepspeed.checkpoint.utils",
    },
)
