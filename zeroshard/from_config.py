"""`initialize`: a DeepSpeed config and a model in, a training engine out. The only place where config meets engine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from zeroshard.config import Config, LeafModules, load_config
from zeroshard.config.models import DEFAULT_LEAVES
from zeroshard.engine.batching import BatchSizes
from zeroshard.engine.build import default_device
from zeroshard.engine.engine import Engine, EngineOptions
from zeroshard.engine.loader import LoaderOptions
from zeroshard.engine.native import build_optimized, make_plan
from zeroshard.errors import ConfigError, UsageError, ZeroShardWarning
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.rules import ADAM, ADAMW, PLAIN_SGD, SGD
from zeroshard.optim.schedules import build_scheduler
from zeroshard.optim.sources import Source, rule_source, torch_source
from zeroshard.plan.builder import MAX_PREFETCH, Precision, Recipe
from zeroshard.plan.dtypes import dtype_name, torch_dtype
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import ExecutionPolicy, OnNonFinite
from zeroshard.sharding.marks import (
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
)

ConfigSource = Mapping[str, Any] | str | os.PathLike[str]
ClientOptimizer = torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer]
ClientScheduler = Any
Result = tuple[Engine, "ShardedOptimizer | None", "DataLoader[Any] | None", Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: ClientOptimizer | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: ClientScheduler | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: Any = None,
    config_params: ConfigSource | None = None,
) -> Result:
    """Make an engine for `model` from a DeepSpeed config; called by all ranks.

    Args:
        args: an object whose `deepspeed_config` names the config, where `config` is not given.
        optimizer: a torch optimizer, or a callable from parameters to one, instead of the config's.
        model_parameters: parameters or parameter groups to train; by default all that require a gradient.
        training_data: a dataset; a distributed loader over it is returned.
        lr_scheduler: a torch scheduler over `optimizer`, or a callable from optimizer to one.
        config: dict, path or JSON text (`config_params` is its older name).

    Returns:
        Engine, optimizer, loader and scheduler; what there is none of is None.

    Raises:
        ConfigError: the config, with the JSON path of each fault.
        PlanError, UsageError: what can't be put together.
    """
    if model is None:
        raise UsageError("initialize needs a model")
    if mpu is not None or mesh_param is not None:
        raise UsageError("initialize: mpu and mesh_param (tensor and pipeline parallelism) are not built yet")
    _join(dist_init_required)
    world = dist.get_world_size() if dist.is_initialized() else 1
    resolved = load_config(
        _config_source(args, config, config_params),
        world_size=world,
        client_optimizer=optimizer is not None,
        client_scheduler=lr_scheduler is not None,
    )
    device = default_device()
    scaler = _scaler(resolved, device)
    parameters = list(model_parameters) if model_parameters is not None else None
    sharded = _shard(model, resolved, optimizer, parameters, scaler, device)
    scheduler = _scheduler(resolved, sharded, lr_scheduler)
    sizes = BatchSizes(resolved.batch.train, resolved.batch.micro, resolved.batch.accumulation)
    engine = Engine(model, sharded, scheduler, sizes, _engine_options(resolved))
    loader = engine.deepspeed_io(training_data, collate_fn=collate_fn) if training_data is not None else None
    return engine, sharded, loader, scheduler


def _join(required: bool | None) -> None:
    """Join the process group that the launcher's environment describes, unless that has been done."""
    if not dist.is_available() or dist.is_initialized() or required is False:
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    elif required:
        raise UsageError("no process group and no RANK in the environment: start the script with `zeroshard run`")


def _config_source(args: Any, config: ConfigSource | None, older: ConfigSource | None) -> ConfigSource:
    if config is not None and older is not None:
        raise UsageError("initialize: give config or config_params, not both")
    named = getattr(args, "deepspeed_config", None)
    source = config if config is not None else older if older is not None else named
    if source is None:
        raise UsageError(
            "initialize needs a config: a dict, a path or JSON text (config=..., or args.deepspeed_config)"
        )
    return source


def _mark_leaves(model: nn.Module, leaves: LeafModules) -> None:
    section = "zero_optimization.leaf_module"
    set_z3_leaf_modules(model, leaves.classes, raise_if_not_found=False)
    for name in leaves.classes:
        if name not in DEFAULT_LEAVES and not set_z3_leaf_modules(model, [name], raise_if_not_found=False):
            raise ConfigError(f"{section}.classes: the model has no module of class {name!r}; name one that it has")
    _, names = set_z3_leaf_modules_by_name(model, leaves.names, raise_if_not_found=False)
    _, suffixes = set_z3_leaf_modules_by_suffix(model, leaves.name_suffixes, raise_if_not_found=False)
    for key, missing in (("names", names), ("name_suffixes", suffixes)):
        if missing:
            raise ConfigError(f"{section}.{key}: the model has no module {missing[0]!r}; name one that it has")


def recipe_of(config: Config, model: nn.Module) -> Recipe:
    """The recipe that a config describes."""
    precision, zero = config.precision, config.zero
    low = precision.compute != "fp32"
    reduction = config.reduction
    policy = ExecutionPolicy(
        prefetch=MAX_PREFETCH,
        reuse=zero.max_reuse_distance > 0,
        accumulate=config.batch.accumulation > 1,
        overlap_step=zero.overlap_comm,
        predivide=reduction.predivide_factor if reduction.prescale else 1.0,
        mean=reduction.op == "mean",
        clip_norm=config.gradient_clipping,
        on_nonfinite=OnNonFinite.SKIP if low or precision.autocast else OnNonFinite.RAISE,
        cast_inputs=precision.compute if low else None,
    )
    kept = precision.keep_in_fp32_modules
    if kept == "auto":
        kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    return Recipe(
        sharding=STAGES[zero.stage],
        precision=Precision(
            param=precision.compute if low else None,
            wire=precision.communication,
            accumulate=precision.grad_accum,
            keep_fp32=kept,
        ),
        policy=policy,
        persistence_threshold=zero.param_persistence_threshold,
        persistence_budget=zero.model_persistence_threshold,
        prefetch_numel=zero.prefetch_bucket_size,
        live_numel=zero.max_live_parameters,
    )


def _scaler(config: Config, device: torch.device) -> LossScaler | None:
    scale = config.loss_scale
    if scale is None:
        return None
    return LossScaler(
        device,
        scale.dynamic,
        scale.initial,
        scale.window,
        scale.hysteresis,
        scale.consecutive_hysteresis,
        scale.minimum,
    )


def _shard(
    model: nn.Module,
    config: Config,
    client: ClientOptimizer | None,
    parameters: list[Any] | None,
    scaler: LossScaler | None,
    device: torch.device,
) -> ShardedOptimizer | None:
    trained = parameters if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    source = _source(config, client, trained)
    _mark_leaves(model, config.zero.leaf_modules)
    plan = make_plan(model, recipe_of(config, model), source, device)
    return build_optimized(model, plan, source, scaler=scaler, device=device)[1]


def _source(config: Config, client: ClientOptimizer | None, parameters: list[Any]) -> Source | None:
    if client is not None:
        built = client if isinstance(client, torch.optim.Optimizer) else client(parameters)
        return torch_source(built, allow_untested=config.allow_untested_optimizer)
    if config.optimizer is not None:
        return _config_optimizer(config.optimizer.type, dict(config.optimizer.params), parameters)
    warnings.warn(
        "initialize: neither the config nor the call names an optimizer; the engine can run forward only",
        ZeroShardWarning,
        stacklevel=4,
    )
    return None


def _config_optimizer(kind: str, params: dict[str, Any], parameters: list[Any]) -> Source:
    """The config's optimizer as a rule. DeepSpeed's Adam decouples the decay unless adam_w_mode is false."""
    if kind == "SGD":
        return rule_source(SGD if params["momentum"] else PLAIN_SGD, parameters, params)
    assert kind in ("Adam", "AdamW"), kind
    rule = ADAMW if params.pop("adam_w_mode", True) else ADAM
    for known_inert in ("torch_adam", "amsgrad"):
        params.pop(known_inert, None)
    return rule_source(rule, parameters, params)


def _scheduler(config: Config, optimizer: ShardedOptimizer | None, client: ClientScheduler | None) -> Any:
    if client is not None:
        return client(optimizer) if callable(client) and not hasattr(client, "step") else client
    if config.scheduler is None:
        return None
    if optimizer is None:
        raise ConfigError("scheduler: there is no optimizer whose learning rate it could set")
    return build_scheduler(optimizer, config.scheduler.type, config.scheduler.params)


def _engine_options(config: Config) -> EngineOptions:
    autocast = config.precision.autocast
    return EngineOptions(
        accumulate_dtype=config.precision.grad_accum,
        autocast=None if autocast is None else torch_dtype(dtype_name(autocast)),
        loader=LoaderOptions(drop_last=config.drop_last),
    )
