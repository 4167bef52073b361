"""zeroshard: ZeRO training for PyTorch from a plan that is a value.

Names are imported when they are first used, so that the command line answers without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.engine.access import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
    )
    from zeroshard.engine.gathered import GatheredParameters, full_state_dict, iterate_full_parameters
    from zeroshard.engine.native import (
        clip_grad_norm_,
        close,
        drain,
        get_global_grad_norm,
        no_sync,
        peer_memory_nbytes,
        plan_of,
        shard,
    )
    from zeroshard.from_config import initialize
    from zeroshard.plan.builder import Precision, Recipe, build_plan
    from zeroshard.plan.placement import STAGES, Sharding
    from zeroshard.plan.plan import ExecutionPolicy, Plan
    from zeroshard.sharding.deferred import Init

__version__ = "0.1.0"

_HOME = {
    "ExecutionPolicy": "zeroshard.plan.plan",
    "GatheredParameters": "zeroshard.engine.gathered",
    "Init": "zeroshard.sharding.deferred",
    "Plan": "zeroshard.plan.plan",
    "Precision": "zeroshard.plan.builder",
    "Recipe": "zeroshard.plan.builder",
    "STAGES": "zeroshard.plan.placement",
    "Sharding": "zeroshard.plan.placement",
    "build_plan": "zeroshard.plan.builder",
    "clip_grad_norm_": "zeroshard.engine.native",
    "close": "zeroshard.engine.native",
    "drain": "zeroshard.engine.native",
    "full_state_dict": "zeroshard.engine.gathered",
    "get_global_grad_norm": "zeroshard.engine.native",
    "initialize": "zeroshard.from_config",
    "iterate_full_parameters": "zeroshard.engine.gathered",
    "no_sync": "zeroshard.engine.native",
    "peer_memory_nbytes": "zeroshard.engine.native",
    "plan_of": "zeroshard.engine.native",
    "safe_get_full_fp32_param": "zeroshard.engine.access",
    "safe_get_full_grad": "zeroshard.engine.access",
    "safe_get_full_optimizer_state": "zeroshard.engine.access",
    "safe_get_local_fp32_param": "zeroshard.engine.access",
    "safe_get_local_grad": "zeroshard.engine.access",
    "safe_get_local_optimizer_state": "zeroshard.engine.access",
    "safe_set_full_fp32_param": "zeroshard.engine.access",
    "safe_set_full_grad": "zeroshard.engine.access",
    "safe_set_full_optimizer_state": "zeroshard.engine.access",
    "safe_set_local_fp32_param": "zeroshard.engine.access",
    "safe_set_local_grad": "zeroshard.engine.access",
    "safe_set_local_optimizer_state": "zeroshard.engine.access",
    "shard": "zeroshard.engine.native",
}

__all__ = [
    "STAGES",
    "ExecutionPolicy",
    "GatheredParameters",
    "Init",
    "Plan",
    "Precision",
    "Recipe",
    "Sharding",
    "build_plan",
    "clip_grad_norm_",
    "close",
    "drain",
    "full_state_dict",
    "get_global_grad_norm",
    "initialize",
    "iterate_full_parameters",
    "no_sync",
    "peer_memory_nbytes",
    "plan_of",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "shard",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
