"""fp32 weights out of a checkpoint."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "get_fp32_state_dict_from_zero_checkpoint": "zeroshard.checkpoint.zero_to_fp32:get_fp32_state_dict_from_zero_checkpoint",
        "convert_zero_checkpoint_to_fp32_state_dict": "zeroshard.checkpoint.zero_to_fp32:convert_zero_checkpoint_to_fp32_state_dict",
        "load_state_dict_from_zero_checkpoint": "zeroshard.checkpoint.zero_to_fp32:load_state_dict_from_zero_checkpoint",
    },
)
