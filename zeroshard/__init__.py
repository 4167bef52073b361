"""zeroshard: ZeRO training for PyTorch from a plan that is a value.

Names are imported when they are first used, so that the command line answers without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.comm.join import init_distributed
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
    from zeroshard.optim.named import Lamb, Lion, MuonAdamW, OneBitAdam, OneBitLamb, ZeroOneAdam
    from zeroshard.plan.builder import Precision, Recipe, build_plan
    from zeroshard.plan.placement import STAGES, Sharding
    from zeroshard.plan.plan import ExecutionPolicy, Plan
    from zeroshard.sharding.deferred import Init

__version__ = "0.1.0"

_HOME = {
    "ExecutionPolicy": "zeroshard.plan.plan",
    "GatheredParameters": "zeroshard.engine.gathered",
    "Init": "zeroshard.sharding.deferred",
    "Lamb": "zeroshard.optim.named",
    "Lion": "zeroshard.optim.named",
    "MuonAdamW": "zeroshard.optim.named",
    "OneBitAdam": "zeroshard.optim.named",
    "OneBitLamb": "zeroshard.optim.named",
    "Plan": "zeroshard.plan.plan",
    "Precision": "zeroshard.plan.builder",
    "Recipe": "zeroshard.plan.builder",
    "STAGES": "zeroshard.plan.placement",
    "Sharding": "zeroshard.plan.placement",
    "ZeroOneAdam": "zeroshard.optim.named",
    "build_plan": "zeroshard.plan.builder",
    "clip_grad_norm_": "zeroshard.engine.native",
    "close": "zeroshard.engine.native",
    "drain": "zeroshard.engine.native",
    "full_state_dict": "zeroshard.engine.gathered",
    "get_global_grad_norm": "zeroshard.engine.native",
    "init_distributed": "zeroshard.comm.join",
    "initialize": "zeroshard.from_config",
    "iterate_full_parameters": "zeroshard.engine.gathered",
    "load": "zeroshard.engine.checkpoints",
    "no_sync": "zeroshard.engine.native",
    "peer_memory_nbytes": "zeroshard.engine.native",
    "plan_of": "zeroshard.engine.native",
    "save": "zeroshard.engine.checkpoints",
    "shard": "zeroshard.engine.native",
    "wait_for_checkpoint": "zeroshard.engine.checkpoints",
}

__all__ = [
    "STAGES",
    "ExecutionPolicy",
    "GatheredParameters",
    "Init",
    "Lamb",
    "Lion",
    "MuonAdamW",
    "OneBitAdam",
    "OneBitLamb",
    "Plan",
    "Precision",
    "Recipe",
    "Sharding",
    "ZeroOneAdam",
    "build_plan",
    "clip_grad_norm_",
    "close",
    "drain",
    "full_state_dict",
    "get_global_grad_norm",
    "init_distributed",
    "initialize",
    "iterate_full_parameters",
    "load",
    "no_sync",
    "peer_memory_nbytes",
    "plan_of",
    "save",
    "shard",
    "wait_for_checkpoint",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
