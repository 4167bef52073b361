"""zeroshard under the import name `deepspeed`, for libraries that look for it.

What is here is what transformers, accelerate, peft, TRL and Lightning use; it is imported from zeroshard when it is
first touched. Anything else raises an error that says so. Code of your own should import zeroshard.
"""

from __future__ import annotations

from deepspeed._conflict import check_alone
from deepspeed._exports import lazy
from deepspeed._finder import install
from deepspeed._version import GIT, PARTS
from deepspeed._version import VERSION as __version__

check_alone()
install()

version = __version__
__version_major__, __version_minor__, __version_patch__ = PARTS
__git_hash__ = git_hash = GIT
__git_branch__ = git_branch = GIT

__getattr__, __dir__ = lazy(
    __name__,
    {
        "DeepSpeedConfig": "deepspeed.runtime.config:DeepSpeedConfig",
        "DeepSpeedConfigError": "deepspeed.runtime.config:DeepSpeedConfigError",
        "DeepSpeedEngine": "deepspeed.runtime.engine:DeepSpeedEngine",
        "DeepSpeedOptimizer": "deepspeed.runtime.base_optimizer:DeepSpeedOptimizer",
        "OnDevice": "zeroshard:OnDevice",
        "PipelineEngine": "deepspeed.runtime.pipe.engine:PipelineEngine",
        "PipelineModule": "zeroshard.pipeline.module:PipelineModule",
        "accelerator": "deepspeed.accelerator",
        "add_config_arguments": "zeroshard.config.arguments:add_config_arguments",
        "checkpoint": "deepspeed.checkpoint",
        "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
        "comm": "deepspeed.comm",
        "dist": "deepspeed.comm",
        "elasticity": "deepspeed.elasticity",
        "git_version_info": "deepspeed.git_version_info",
        "get_accelerator": "deepspeed.accelerator:get_accelerator",
        "init_distributed": "deepspeed.comm:init_distributed",
        "initialize": "deepspeed._initialize:initialize",
        "launcher": "deepspeed.launcher",
        "log_dist": "deepspeed.utils:log_dist",
        "logger": "deepspeed.utils:logger",
        "moe": "deepspeed.moe",
        "monitor": "deepspeed.monitor",
        "ops": "deepspeed.ops",
        "pipe": "deepspeed.pipe",
        "profiling": "deepspeed.profiling",
        "runtime": "deepspeed.runtime",
        "sequence": "deepspeed.sequence",
        "tp_model_init": "deepspeed._tensor_parallel:tp_model_init",
        "utils": "deepspeed.utils",
        "zero": "deepspeed.runtime.zero",
    },
)
