"""One builder per engine, all with the same face: what is timed is `Trainer.step`, whoever is behind it.

    floor               forward and backward in bf16 alone, on each GPU for itself: no optimizer, no communication
    ddp                 DistributedDataParallel, bf16 by autocast over fp32 parameters, one fused AdamW
    fsdp2               fully_shard on every block and the root, bf16 parameters and reduction
    fsdp2-z2            the same, parameters kept after the forward (reshard_after_forward=False)
    deepspeed1..3       ZeRO stage 1, 2 or 3
    zeroshard1..3       ZeRO stage 1, 2 or 3
    initialize1..3      the same by `zeroshard.initialize` with DeepSpeed's JSON and loop

`tuned` is what a user who reads the manual adds. FSDP2: the norm is taken on local tensors, blocks are prefetched by
explicit lists, embedding and head are units of their own, and on torch 2.13 and newer reductions get a communicator of
their own and two buffers. DeepSpeed: the throughput timer, which synchronises, is off, and blocks are leaf modules.
zeroshard: embedding and head are units of their own (units). `spare`: what so many GiB hold stays gathered from forward
to backward (spare_nbytes). `graph`: steps are replayed as a CUDA graph, by `zeroshard.GraphedStep`, or by torch's own
for the floor.

`offload` puts the optimizer's state into host memory: streamed or processor say how zeroshard updates it, param and
param-processor add the parameters, auto lets its planner choose stage, offload and share for the memory there is; FSDP2
has its CPUOffloadPolicy, which moves parameters too, and DeepSpeed offload_optimizer. nvme puts it on a disk
(`folders`), but for `kept_share` of it, which rests in host memory.

All train with AdamW, clip the global norm to 1 (unless `clip` says otherwise) and keep the master state in fp32. An
engine is imported by its builder only, so that one that is missing takes nothing else with it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from benchmarks.llama import Block, Llama, initialize
from benchmarks.setting import (
    BETAS,
    DECAY,
    OPTIMIZER,
    MicroBatch,
    NotInstalled,
    Setting,
    Trainer,
    adamw,
    backward,
    model_of,
    numel_of,
)
from benchmarks.wire import counted, planned

SEED = 0
DEEPSPEED_BUCKET = 200_000_000
PACKAGES = {
    "deepspeed": ("deepspeed",),
    "zeroshard": ("zeroshard.engine.native", "zeroshard.sharding.deferred.init"),
    "initialize": ("zeroshard.from_config", "zeroshard.sharding.deferred.init"),
}


def load(engine: str) -> None:
    """Import what `engine` needs, so that its building can be timed without that.

    torch's own compiler front end is loaded for all of them: who touches it first would pay seconds for everybody.

    Raises:
        NotInstalled: its package is missing, or zeroshard's own answers to the name of DeepSpeed.
    """
    importlib.import_module("torch._dynamo")
    package = engine.rstrip("123")
    for module in PACKAGES.get(package, ()):
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            raise NotInstalled(f"{package} is not installed") from error
        if module == "deepspeed" and "+zeroshard" in found.__version__:
            raise NotInstalled("deepspeed is not installed, only zeroshard's own")


def build(setting: Setting) -> Trainer:
    """Build the engine that `setting` names, on all ranks. The same values everywhere, by the same seed.

    Raises:
        NotInstalled: its package is missing.
    """
    load(setting.engine)
    torch.manual_seed(SEED)
    return ENGINES[setting.engine](setting)


# The floor and DDP


def build_floor(setting: Setting) -> Trainer:
    with setting.device:
        model = model_of(setting).to(torch.bfloat16)
    if setting.compiled:
        model.compile_blocks()

    def step(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        return backward(model, micro_batches)

    # Without a GPU a graph is the step as it is, as for GraphedStep: presets are tried there.
    graphed = setting.graph and setting.device.type == "cuda"
    return Trainer(_graphed_floor(step, setting) if graphed else step, numel_of(model))


def _graphed_floor(step: Callable[[Sequence[MicroBatch]], torch.Tensor], setting: Setting) -> Any:
    """The floor without a host: its third step is captured, later ones are replayed."""
    stream, graph = torch.cuda.Stream(setting.device), torch.cuda.CUDAGraph()
    static: list[MicroBatch] = []
    losses: list[torch.Tensor] = []

    def graphed(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        with torch.cuda.stream(stream):
            if not static:
                for _ in range(2):
                    step(micro_batches)
                static.extend((ids.clone(), targets.clone()) for ids, targets in micro_batches)
                with torch.cuda.graph(graph, stream=stream):
                    losses.append(step(static))
            for (ids, targets), (new_ids, new_targets) in zip(static, micro_batches, strict=True):
                ids.copy_(new_ids)
                targets.copy_(new_targets)
            graph.replay()
        return losses[0]

    return graphed


def build_ddp(setting: Setting) -> Trainer:
    with setting.device:
        model = model_of(setting)
    if setting.compiled:
        model.compile_blocks()
    ids = [setting.device.index] if setting.device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters(), setting, fused=True)

    def step(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        with ddp.no_sync() if len(micro_batches) > 1 else nullcontext():
            backward(ddp, micro_batches[:-1], len(micro_batches), autocast=setting.device.type)
        loss = backward(ddp, micro_batches[-1:], len(micro_batches), autocast=setting.device.type)
        with record_function(OPTIMIZER):
            if setting.clip:
                nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    return Trainer(step, numel_of(model))


# FSDP2


def build_fsdp2(setting: Setting) -> Trainer:
    # A DTensor draws other random numbers than a plain tensor, so exact values have to be there before it is sharded.
    with setting.device if setting.exact else torch.device("meta"):
        model = model_of(setting)
    numel = numel_of(model)
    if setting.fp8 != "none":
        _convert_by_torchao(model, setting.fp8, setting.device)
    if setting.compiled:
        model.compile_blocks()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    options: dict[str, Any] = {"mp_policy": policy}
    away = setting.offload != "none"
    if away:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=setting.device.type == "cuda")
    if setting.engine == "fsdp2-z2":
        options["reshard_after_forward"] = False
    if dist.get_world_size() == 1 or setting.device.type == "cpu":
        options["mesh"] = dist.init_device_mesh(setting.device.type, (dist.get_world_size(),))
    units: list[nn.Module | list[nn.Module]] = [*model.blocks]
    if setting.tuned:
        units = [model.embed, *units, [model.norm, model.head]]
    for unit in units:
        fully_shard(unit, **options)
    fully_shard(model, **options)
    if setting.tuned:
        tune_fsdp2(model)
    if not setting.exact:
        model.to_empty(device="cpu" if away else setting.device)
        initialize(model)
    # On CPU fused AdamW does not know DTensors; foreach is the fastest there.
    optimizer = adamw(model.parameters(), setting, fused=setting.device.type == "cuda")

    def step(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        loss = backward(model, micro_batches, len(micro_batches))
        with record_function(OPTIMIZER):
            if setting.clip and setting.tuned:
                clip_local_(model.parameters(), setting.clip)
            elif setting.clip:
                nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if setting.fp8 == "tensorwise":
                _scale_by_torchao(model)
        return loss

    return Trainer(step, numel, wire=lambda one: counted(model, one))


def _convert_by_torchao(model: nn.Module, recipe: str, device: torch.device) -> None:
    """The linear layers of the blocks, as torchao's manual has it: weights are gathered in fp8 where they can be.

    Raises:
        NotInstalled: torchao is missing. It has no compiled part that this needs, so its unpacked wheel will do.
    """
    try:
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ModuleNotFoundError as error:
        raise NotInstalled("torchao is not installed: put its unpacked wheel on PYTHONPATH") from error
    config = Float8LinearConfig.from_recipe_name(recipe)
    emulate = device.type == "cpu"
    config = replace(config, emulate=emulate, enable_fsdp_float8_all_gather=recipe == "tensorwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: path.startswith("blocks."))


def _scale_by_torchao(model: nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp  # pyright: ignore[reportMissingImports]

    precompute_float8_dynamic_scale_for_fsdp(model)


def tune_fsdp2(model: Llama) -> None:
    """Explicit prefetch one block ahead, both ways, and on newer torch concurrent reductions."""
    blocks = [block for block in model.blocks if isinstance(block, FSDPModule)]
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    if isinstance(model, FSDPModule) and _torch_version() >= (2, 13):
        model.set_separate_reduce_scatter_group(True)
        model.set_reduce_scatter_max_input_buffers(2)


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


@torch.no_grad()
def clip_local_(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Scale sharded gradients to a global norm of at most `limit`, without DTensor dispatch and without a host sync."""
    parts: list[torch.Tensor] = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            parts.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    squared = torch.stack(torch._foreach_norm(parts)).float().square().sum()
    dist.all_reduce(squared)
    torch._foreach_mul_(parts, (limit / (squared.sqrt() + 1e-6)).clamp(max=1.0))


# DeepSpeed


def build_deepspeed(setting: Setting) -> Trainer:
    import deepspeed  # pyright: ignore[reportMissingImports]

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = deepspeed_config(setting)
    if setting.stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = model_of(setting)
    else:
        with setting.device:
            model = model_of(setting).to(torch.bfloat16)
    if setting.compiled:
        model.compile_blocks()
    if setting.tuned and setting.stage == 3:
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    if setting.offload == "none":
        optimizer = adamw(model.parameters(), setting, fused=True)
    else:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=setting.rate, betas=BETAS, weight_decay=DECAY)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        loss = torch.zeros(())
        for index, (ids, targets) in enumerate(micro_batches):
            loss = engine(ids, targets)
            engine.backward(loss)
            with record_function(OPTIMIZER) if index == len(micro_batches) - 1 else nullcontext():
                engine.step()
        return loss.detach()

    return Trainer(step, setting.shape.numel)


def deepspeed_config(setting: Setting) -> dict[str, Any]:
    """The JSON that DeepSpeed is given."""
    zero: dict[str, Any] = {"stage": setting.stage, "overlap_comm": True, "contiguous_gradients": True}
    if setting.stage < 3:
        zero.update(reduce_bucket_size=DEEPSPEED_BUCKET, allgather_bucket_size=DEEPSPEED_BUCKET)
    if setting.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if setting.offload.startswith("param"):
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": setting.clip,
        "gradient_accumulation_steps": setting.accumulation,
        "train_micro_batch_size_per_gpu": setting.batch,
        "steps_per_print": 10**9,
    }
    if setting.tuned:
        config["timers"] = {"throughput": {"enabled": False, "synchronized": False}}
    return config


# zeroshard


def build_zeroshard(setting: Setting) -> Trainer:
    import zeroshard
    from zeroshard.engine.native import abandon

    # Deferred, so that no rank ever holds the whole model: each tensor is made, cut and forgotten.
    with zeroshard.Init(device=setting.device):
        model = model_of(setting)
    numel = numel_of(model)
    if setting.compiled:
        model.compile_blocks()
    policy = zeroshard.ExecutionPolicy(
        clip_norm=setting.clip,
        accumulate=setting.accumulation > 1,
        overlap_step=True,
        spare_nbytes=round(setting.spare * 2**30),
    )
    recipe = zeroshard.Recipe(
        sharding=zeroshard.STAGES[setting.stage],
        precision=zeroshard.Precision(param="bf16", matmul=_zeroshard_fp8(setting)),
        policy=policy,
        offload=_zeroshard_offload(setting),
    )
    units = ["embed", *(f"blocks.{index}" for index in range(len(model.blocks))), "head"]
    sharded, optimizer = zeroshard.shard(
        model,
        adamw(model.parameters(), setting, fused=False),
        plan=_automatic(setting, recipe) if setting.offload == "auto" else recipe,
        units=units if setting.tuned else None,
        device=setting.device,
    )
    assert optimizer is not None

    def step(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        loss = backward(sharded, micro_batches, len(micro_batches))
        with record_function(OPTIMIZER):
            optimizer.step()
            optimizer.zero_grad()
        return loss

    taken = zeroshard.GraphedStep(sharded, step) if setting.graph else step
    outside = zeroshard.peer_memory_nbytes(sharded)
    plan = partial(zeroshard.plan_of, sharded)
    return Trainer(
        taken,
        numel,
        outside,
        close=lambda: zeroshard.close(sharded),
        plan=plan,
        wire=lambda _: planned(plan()),
        drain=lambda: zeroshard.drain(sharded),
        abandon=lambda: abandon(sharded),
        pass_over_disk=lambda: _pass_over_disk(sharded),
    )


def _pass_over_disk(model: nn.Module) -> int:
    from zeroshard.engine.core.handle import handle_of
    from zeroshard.nvme.measure import StatePass
    from zeroshard.nvme.memory import NvmeMemory
    from zeroshard.plan.placement import Tier

    memory = handle_of(model).runtime.storage.tiers.get(Tier.NVME)
    return StatePass(memory.volume, memory.used).both() if isinstance(memory, NvmeMemory) else 0


def build_initialize(setting: Setting) -> Trainer:
    """The engine of a JSON, without offload."""
    import zeroshard

    assert setting.offload == "none", "offload is measured on the native interface"
    with zeroshard.Init(device=setting.device):
        model = model_of(setting)
    if setting.compiled:
        model.compile_blocks()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.batch,
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_clipping": setting.clip,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": setting.stage},
        "zero_allow_untested_optimizer": True,
    }
    if setting.fp8 != "none":
        names = _fp8_layers(setting)
        config["fp8"] = {"enabled": True, "recipe": setting.fp8, "tokens": setting.batch * setting.length}
        config["fp8"]["filter"] = "auto" if names is None else list(names)
    optimizer = adamw(model.parameters(), setting, fused=False)
    engine = zeroshard.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        loss = torch.zeros(())
        for ids, targets in micro_batches:
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    taken = zeroshard.GraphedStep(engine, step) if setting.graph else step
    outside, plan = zeroshard.peer_memory_nbytes(engine.module), partial(zeroshard.plan_of, engine.module)
    return Trainer(taken, setting.shape.numel, outside, engine.destroy, plan, lambda _: planned(plan()))


def _zeroshard_fp8(setting: Setting) -> Any:
    import zeroshard

    if setting.fp8 == "none":
        return None
    tokens = setting.batch * setting.length
    scaling, cast = zeroshard.Scaling(setting.fp8.removesuffix("-cast")), setting.fp8.endswith("-cast")
    return zeroshard.Fp8(scaling, _fp8_layers(setting), tokens, not cast)


def _fp8_layers(setting: Setting) -> tuple[str, ...] | None:
    """Names of the layers that multiply in fp8; None lets zeroshard choose."""
    return None if setting.fp8_layers == "auto" else tuple(setting.fp8_layers.split(","))


def _zeroshard_offload(setting: Setting) -> Any:
    import zeroshard

    if setting.offload in ("none", "auto"):
        return None
    if setting.offload == "nvme":
        disk = zeroshard.Offload(tier=zeroshard.Tier.NVME, spill=zeroshard.Spill(setting.folders))
        return replace(disk, ratio=setting.host_share, host_ratio=setting.kept_share)
    update = zeroshard.HostUpdate.PROCESSOR if "processor" in setting.offload else zeroshard.HostUpdate.STREAMED
    return zeroshard.Offload(setting.host_share, setting.offload.startswith("param"), update)


def _automatic(setting: Setting, recipe: Any) -> Any:
    """Stage, offload and its share by what is free, or by `cap_gib`."""
    import zeroshard

    ids = torch.empty(setting.batch, setting.length, dtype=torch.int64, device="meta")
    cap = None if setting.cap_gib is None else setting.cap_gib * 2**30
    return zeroshard.AutoPlan(recipe, example=(ids, ids), device_memory=cap)


ENGINES: dict[str, Callable[[Setting], Trainer]] = {
    "floor": build_floor,
    "ddp": build_ddp,
    "fsdp2": build_fsdp2,
    "fsdp2-z2": build_fsdp2,
    **{f"deepspeed{stage}": build_deepspeed for stage in (1, 2, 3)},
    **{f"zeroshard{stage}": build_zeroshard for stage in (1, 2, 3)},
    **{f"initialize{stage}": build_initialize for stage in (1, 2, 3)},
}
