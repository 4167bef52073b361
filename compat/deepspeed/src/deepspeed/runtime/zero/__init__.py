"""deepspeed.zero: sharded parameters."""

from __future__ import annotations

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "GatheredParameters": "deepspeed.runtime.zero.partition_parameters:GatheredParameters",
        "Init": "deepspeed.runtime.zero.partition_parameters:Init",
        "TiledLinear": "zeroshard:TiledLinear",
        "TiledLinearReturnBias": "zeroshard.sharding.tiled:TiledLinearReturnBias",
        "ZeroParamStatus": "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus",
        "config": "deepspeed.runtime.zero.config",
        "leaf_module_config": "deepspeed.runtime.zero.leaf_module_config",
        "offload_config": "deepspeed.runtime.zero.offload_config",
        "parameter_offload": "deepspeed.runtime.zero.parameter_offload",
        "partition_parameters": "deepspeed.runtime.zero.partition_parameters",
        "register_external_parameter": "zeroshard:register_external_parameter",
        "unregister_external_parameter": "zeroshard:unregister_external_parameter",
        "stage3": "deepspeed.runtime.zero.stage3",
        "stage_1_and_2": "deepspeed.runtime.zero.stage_1_and_2",
        "tiling": "deepspeed.runtime.zero.tiling",
        "unwrap_model_for_generation": "deepspeed.runtime.zero.unwrapping:unwrap_model_for_generation",
        "utils": "deepspeed.runtime.zero.utils",
    },
)
