"""zeroshard: ZeRO training for PyTorch from a plan that is a value.

Names are imported when they are first used, so that the command line answers without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.checkpoint.pretrained import Pretrained, from_pretrained
    from zeroshard.comm.join import init_distributed
    from zeroshard.config.arguments import add_config_arguments
    from zeroshard.elastic.run import run_elastic
    from zeroshard.engine.automatic import AutoPlan
    from zeroshard.engine.graphed import GraphedStep
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
    from zeroshard.engine.outside_step.access import (
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
    from zeroshard.engine.outside_step.clip_value import clip_grad_value_
    from zeroshard.engine.outside_step.external import register_external_parameter, unregister_external_parameter
    from zeroshard.engine.outside_step.gathered import GatheredParameters, full_state_dict, iterate_full_parameters
    from zeroshard.engine.outside_step.memory_use import memory_status, see_memory_usage
    from zeroshard.engine.outside_step.offload_states import offload_states, reload_states
    from zeroshard.engine.saving.checkpoints import load, save, wait_for_checkpoint
    from zeroshard.engine.saving.preemption import PREEMPTED, Preemption
    from zeroshard.fp8.recipe import Fp8, Scaling
    from zeroshard.from_config import initialize
    from zeroshard.mesh import Mesh, MeshAxis
    from zeroshard.nvme.places import Spill
    from zeroshard.observe.comms import log_summary
    from zeroshard.observe.flops.profile import get_model_profile
    from zeroshard.optim.adam.host_adam import CPUAdam
    from zeroshard.optim.own_optimizers import (
        Adam4bit,
        Adam8bit,
        AdamW4bit,
        AdamW8bit,
        Dion,
        Lamb,
        Lion,
        MuonAdamW,
        OneBitAdam,
        OneBitLamb,
        ZeroOneAdam,
    )
    from zeroshard.pipeline.layers import LayerSpec, TiedLayerSpec
    from zeroshard.pipeline.module import PipelineModule
    from zeroshard.pipeline.vertical import VerticalSchedule
    from zeroshard.plan.builder import Precision, Recipe, build_plan
    from zeroshard.plan.hops import Feedback, GradientCodes
    from zeroshard.plan.offload import Offload
    from zeroshard.plan.placement import STAGES, Blocks, Sharding, Tier
    from zeroshard.plan.plan import Plan
    from zeroshard.plan.policy import ExecutionPolicy, HostUpdate
    from zeroshard.sharding.activations import checkpoint_activations
    from zeroshard.sharding.deferred.init import Init
    from zeroshard.sharding.marks import (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        set_z3_leaf_modules_by_name,
        set_z3_leaf_modules_by_suffix,
        unset_z3_leaf_modules,
        z3_leaf_module,
    )
    from zeroshard.sharding.on_device import OnDevice
    from zeroshard.sharding.quantized_init import QuantizedInit
    from zeroshard.sharding.tiled import TiledLinear

__version__ = "0.1.0"

_HOME = {
    "Adam4bit": "zeroshard.optim.own_optimizers",
    "Adam8bit": "zeroshard.optim.own_optimizers",
    "AdamW4bit": "zeroshard.optim.own_optimizers",
    "AdamW8bit": "zeroshard.optim.own_optimizers",
    "Blocks": "zeroshard.plan.placement",
    "Feedback": "zeroshard.plan.hops",
    "GradientCodes": "zeroshard.plan.hops",
    "AutoPlan": "zeroshard.engine.automatic",
    "CPUAdam": "zeroshard.optim.adam.host_adam",
    "Dion": "zeroshard.optim.own_optimizers",
    "ExecutionPolicy": "zeroshard.plan.policy",
    "GatheredParameters": "zeroshard.engine.outside_step.gathered",
    "GraphedStep": "zeroshard.engine.graphed",
    "Init": "zeroshard.sharding.deferred.init",
    "Lamb": "zeroshard.optim.own_optimizers",
    "LayerSpec": "zeroshard.pipeline.layers",
    "PipelineModule": "zeroshard.pipeline.module",
    "TiedLayerSpec": "zeroshard.pipeline.layers",
    "VerticalSchedule": "zeroshard.pipeline.vertical",
    "Lion": "zeroshard.optim.own_optimizers",
    "MuonAdamW": "zeroshard.optim.own_optimizers",
    "OneBitAdam": "zeroshard.optim.own_optimizers",
    "OneBitLamb": "zeroshard.optim.own_optimizers",
    "Mesh": "zeroshard.mesh",
    "MeshAxis": "zeroshard.mesh",
    "Plan": "zeroshard.plan.plan",
    "Precision": "zeroshard.plan.builder",
    "QuantizedInit": "zeroshard.sharding.quantized_init",
    "Fp8": "zeroshard.fp8.recipe",
    "Scaling": "zeroshard.fp8.recipe",
    "Pretrained": "zeroshard.checkpoint.pretrained",
    "Recipe": "zeroshard.plan.builder",
    "Offload": "zeroshard.plan.offload",
    "HostUpdate": "zeroshard.plan.policy",
    "Spill": "zeroshard.nvme.places",
    "Tier": "zeroshard.plan.placement",
    "STAGES": "zeroshard.plan.placement",
    "Sharding": "zeroshard.plan.placement",
    "ZeroOneAdam": "zeroshard.optim.own_optimizers",
    "add_config_arguments": "zeroshard.config.arguments",
    "build_plan": "zeroshard.plan.builder",
    "checkpoint_activations": "zeroshard.sharding.activations",
    "clip_grad_norm_": "zeroshard.engine.native",
    "clip_grad_value_": "zeroshard.engine.outside_step.clip_value",
    "close": "zeroshard.engine.native",
    "drain": "zeroshard.engine.native",
    "from_pretrained": "zeroshard.checkpoint.pretrained",
    "full_state_dict": "zeroshard.engine.outside_step.gathered",
    "get_model_profile": "zeroshard.observe.flops.profile",
    "get_global_grad_norm": "zeroshard.engine.native",
    "init_distributed": "zeroshard.comm.join",
    "initialize": "zeroshard.from_config",
    "iterate_full_parameters": "zeroshard.engine.outside_step.gathered",
    "load": "zeroshard.engine.saving.checkpoints",
    "log_summary": "zeroshard.observe.comms",
    "no_sync": "zeroshard.engine.native",
    "offload_states": "zeroshard.engine.outside_step.offload_states",
    "peer_memory_nbytes": "zeroshard.engine.native",
    "plan_of": "zeroshard.engine.native",
    "save": "zeroshard.engine.saving.checkpoints",
    "run_elastic": "zeroshard.elastic.run",
    "safe_get_full_fp32_param": "zeroshard.engine.outside_step.access",
    "safe_get_full_grad": "zeroshard.engine.outside_step.access",
    "safe_get_full_optimizer_state": "zeroshard.engine.outside_step.access",
    "safe_get_local_fp32_param": "zeroshard.engine.outside_step.access",
    "safe_get_local_grad": "zeroshard.engine.outside_step.access",
    "safe_get_local_optimizer_state": "zeroshard.engine.outside_step.access",
    "safe_set_full_fp32_param": "zeroshard.engine.outside_step.access",
    "safe_set_full_grad": "zeroshard.engine.outside_step.access",
    "safe_set_full_optimizer_state": "zeroshard.engine.outside_step.access",
    "safe_set_local_fp32_param": "zeroshard.engine.outside_step.access",
    "safe_set_local_grad": "zeroshard.engine.outside_step.access",
    "safe_set_local_optimizer_state": "zeroshard.engine.outside_step.access",
    "reload_states": "zeroshard.engine.outside_step.offload_states",
    "register_external_parameter": "zeroshard.engine.outside_step.external",
    "unregister_external_parameter": "zeroshard.engine.outside_step.external",
    "see_memory_usage": "zeroshard.engine.outside_step.memory_use",
    "memory_status": "zeroshard.engine.outside_step.memory_use",
    "TiledLinear": "zeroshard.sharding.tiled",
    "OnDevice": "zeroshard.sharding.on_device",
    "PREEMPTED": "zeroshard.engine.saving.preemption",
    "Preemption": "zeroshard.engine.saving.preemption",
    "set_z3_leaf_modules": "zeroshard.sharding.marks",
    "unset_z3_leaf_modules": "zeroshard.sharding.marks",
    "set_z3_leaf_module": "zeroshard.sharding.marks",
    "z3_leaf_module": "zeroshard.sharding.marks",
    "get_z3_leaf_modules": "zeroshard.sharding.marks",
    "set_z3_leaf_modules_by_name": "zeroshard.sharding.marks",
    "set_z3_leaf_modules_by_suffix": "zeroshard.sharding.marks",
    "shard": "zeroshard.engine.native",
    "wait_for_checkpoint": "zeroshard.engine.saving.checkpoints",
}

__all__ = [
    "PREEMPTED",
    "STAGES",
    "Adam4bit",
    "Adam8bit",
    "AdamW4bit",
    "AdamW8bit",
    "AutoPlan",
    "Blocks",
    "CPUAdam",
    "Dion",
    "ExecutionPolicy",
    "Feedback",
    "Fp8",
    "GatheredParameters",
    "GradientCodes",
    "GraphedStep",
    "HostUpdate",
    "Init",
    "Lamb",
    "LayerSpec",
    "Lion",
    "Mesh",
    "MeshAxis",
    "MuonAdamW",
    "Offload",
    "OnDevice",
    "OneBitAdam",
    "OneBitLamb",
    "PipelineModule",
    "Plan",
    "Precision",
    "Preemption",
    "Pretrained",
    "QuantizedInit",
    "Recipe",
    "Scaling",
    "Sharding",
    "Spill",
    "TiedLayerSpec",
    "Tier",
    "TiledLinear",
    "VerticalSchedule",
    "ZeroOneAdam",
    "add_config_arguments",
    "build_plan",
    "checkpoint_activations",
    "clip_grad_norm_",
    "clip_grad_value_",
    "close",
    "drain",
    "from_pretrained",
    "full_state_dict",
    "get_global_grad_norm",
    "get_model_profile",
    "get_z3_leaf_modules",
    "init_distributed",
    "initialize",
    "iterate_full_parameters",
    "load",
    "log_summary",
    "memory_status",
    "no_sync",
    "offload_states",
    "peer_memory_nbytes",
    "plan_of",
    "register_external_parameter",
    "reload_states",
    "run_elastic",
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
    "save",
    "see_memory_usage",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "shard",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "wait_for_checkpoint",
    "z3_leaf_module",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
