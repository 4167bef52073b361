"""fp32 weights out of a checkpoint."""

from __future__ import annotations

from deepspeed._exports import lazy

_HOME = "zeroshard.checkpoint.zero_to_fp32"

__getattr__, __dir__ = lazy(
    __name__,
    {
        "get_fp32_state_dict_from_zero_checkpoint": f"{_HOME}:get_fp32_state_dict_from_zero_checkpoint",
        "convert_zero_checkpoint_to_fp32_state_dict": f"{_HOME}:convert_zero_checkpoint_to_fp32_state_dict",
        "load_state_dict_from_zero_checkpoint": f"{_HOME}:load_state_dict_from_zero_checkpoint",
    },
)
