"""Logging, access to single parameters, and marks."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "groups": "deepspeed.utils.groups",
        "logging": "deepspeed.utils.logging",
        "torch": "deepspeed.utils.torch",
        "zero_to_fp32": "deepspeed.utils.zero_to_fp32",
        "logger": "deepspeed.utils.logging:logger",
        "log_dist": "deepspeed.utils.logging:log_dist",
        "set_log_level_from_string": "deepspeed.utils.logging:set_log_level_from_string",
        "is_initialized": "deepspeed.comm:is_initialized",
        "RepeatingLoader": "deepspeed.runtime.dataloader:RepeatingLoader",
        "OnDevice": "zeroshard:OnDevice",
        "safe_get_full_fp32_param": "deepspeed._access:safe_get_full_fp32_param",
        "safe_get_full_grad": "deepspeed._access:safe_get_full_grad",
        "safe_get_full_optimizer_state": "zeroshard:safe_get_full_optimizer_state",
        "safe_get_local_fp32_param": "deepspeed._access:safe_get_local_fp32_param",
        "safe_get_local_grad": "zeroshard:safe_get_local_grad",
        "safe_get_local_optimizer_state": "zeroshard:safe_get_local_optimizer_state",
        "safe_set_full_fp32_param": "zeroshard:safe_set_full_fp32_param",
        "safe_set_full_grad": "zeroshard:safe_set_full_grad",
        "safe_set_full_optimizer_state": "zeroshard:safe_set_full_optimizer_state",
        "safe_set_local_fp32_param": "zeroshard:safe_set_local_fp32_param",
        "safe_set_local_grad": "zeroshard:safe_set_local_grad",
        "safe_set_local_optimizer_state": "zeroshard:safe_set_local_optimizer_state",
        "safe_update_full_grad_vectorized": "deepspeed._access:safe_update_full_grad_vectorized",
        "get_z3_leaf_modules": "zeroshard:get_z3_leaf_modules",
        "set_z3_leaf_module": "zeroshard:set_z3_leaf_module",
        "set_z3_leaf_modules": "deepspeed._leaves:set_z3_leaf_modules",
        "set_z3_leaf_modules_by_name": "zeroshard:set_z3_leaf_modules_by_name",
        "set_z3_leaf_modules_by_suffix": "zeroshard:set_z3_leaf_modules_by_suffix",
        "unset_z3_leaf_modules": "zeroshard:unset_z3_leaf_modules",
        "z3_leaf_module": "zeroshard:z3_leaf_module",
    },
)
