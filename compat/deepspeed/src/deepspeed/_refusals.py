"""What is said of names that DeepSpeed has and this package has not.

A missing attribute is an AttributeError, so that `hasattr` and `getattr` with a default work. A missing module, or a
name after `from ... import`, is an ImportError, which the finder in `_finder.py` raises.
"""

from __future__ import annotations

_SAYS = "this is zeroshard's compat package, not DeepSpeed"
_GENERAL = (
    "zeroshard has no counterpart. If a script of yours needs it, install the real deepspeed in an environment of its "
    "own"
)
_SERVING = "zeroshard trains; export the weights (zeroshard checkpoint export) and serve them elsewhere"
_REPLACED = {
    "deepspeed.init_inference": _SERVING,
    "deepspeed.inference": _SERVING,
    "deepspeed.InferenceEngine": _SERVING,
    "deepspeed.moe": "MoE of deepspeed.moe.layer is there; its experts are divided by ep_size or expert_parallel",
    "deepspeed.sequence": "deepspeed.sequence.layer.DistributedAttention and UlyssesSPAttentionHF divide sequences",
    "deepspeed.sequence.fpdt_layer": "attention in chunks on the host is not built; see docs/parallelism.md",
    "deepspeed.checkpoint": "checkpoints load at any number of ranks; for DeepSpeed's: zeroshard checkpoint import",
    "deepspeed.runtime.swap_tensor": "optimizer state on disk is moved by the plan; see docs/offload.md",
    "deepspeed.runtime.torch_autocast": "torch.autocast in the forward works as it is",
    "deepspeed.runtime.zero.MiCS_Init": "deepspeed.zero.Init builds models for mics_shard_size too",
    "deepspeed.runtime.zero.linear": "linear layers stay torch's own",
    "deepspeed.runtime.zero.offload_states": "engine.offload_states and reload_states are there",
    "deepspeed.runtime.zero.parameter_offload": "the plan gathers parameters; see docs/engine.md",
    "deepspeed.runtime.zero.partition_parameters": "the plan gathers parameters; see docs/engine.md",
    "deepspeed.runtime.pipe": "PipelineModule, its engine and topologies are there; torch runs the schedules",
    "deepspeed.compression": "compression was removed upstream and is not built here",
    "deepspeed.autotuning": "use zeroshard plan, which chooses stage and batch from the model",
    "deepspeed.profiling": "get_model_profile and FlopsProfiler are there, in deepspeed.profiling.flops_profiler",
    "deepspeed.monitor": "engine.monitor, or monitor.MonitorMaster, writes to all that the config names",
    "deepspeed.ops.op_builder": "zeroshard compiles nothing at run time",
    "deepspeed.ops.transformer": "use the model's own attention",
    "deepspeed.ops.sparse_attention": "sparse attention was removed upstream and is not built here",
    "deepspeed.ops.adam.OnebitAdam": "use zeroshard.OneBitAdam",
    "deepspeed.runtime.fp16": "the loss scale is the engine's; for one-bit optimizers see zeroshard.OneBitAdam",
    "deepspeed.utils.groups": "the groups of data, of divided sequences and of experts exist",
}


class MissingNameError(AttributeError):
    """An attribute that DeepSpeed may have and this package has not."""


class MissingModuleError(ImportError):
    """A module, or a name to be imported, that DeepSpeed may have and this package has not."""


def refusal(name: str) -> str:
    """What to say of a dotted name: the entry that is nearest to it in the table, by prefix."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        said = _REPLACED.get(".".join(parts[:length]))
        if said is not None:
            return f"{name} is not there ({_SAYS}): {said}"
    return f"{name} is not there ({_SAYS}): {_GENERAL}"
