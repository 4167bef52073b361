"""zeroshard: ZeRO training for PyTorch from a plan that is a value."""

from zeroshard.engine.gathered import GatheredParameters, full_state_dict, iterate_full_parameters
from zeroshard.engine.native import (
    clip_grad_norm_,
    close,
    drain,
    get_global_grad_norm,
    no_sync,
    plan_of,
    shard,
)
from zeroshard.initialize import initialize
from zeroshard.shard.deferred import Init

__version__ = "0.1.0"

__all__ = [
    "GatheredParameters",
    "Init",
    "clip_grad_norm_",
    "close",
    "drain",
    "full_state_dict",
    "get_global_grad_norm",
    "initialize",
    "iterate_full_parameters",
    "no_sync",
    "plan_of",
    "shard",
]
