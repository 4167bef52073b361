"""`initialize`: a DeepSpeed config and a model in, a training engine out. The only place where config meets engine."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from zeroshard import checkpointing
from zeroshard.arguments import need_kind
from zeroshard.auto_config import ConfigSource, chosen_document, example_from, kept_in_fp32
from zeroshard.cluster import rank_place
from zeroshard.comm.device_mesh import mesh_from
from zeroshard.comm.join import init_distributed
from zeroshard.comm.stages import find_stage
from zeroshard.config import ActivationConfig, Config, LeafModules, load_config
from zeroshard.config.document import read_document
from zeroshard.config.models import DEFAULT_LEAVES
from zeroshard.config.problems import Problems
from zeroshard.config.resolve import resolve
from zeroshard.division import divide_model
from zeroshard.elastic.session import current_session
from zeroshard.engine.batching import BatchSizes
from zeroshard.engine.build import default_device
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.engine import Engine
from zeroshard.engine.engine_options import EngineOptions
from zeroshard.engine.loader import LoaderOptions
from zeroshard.engine.native import build_optimized, close
from zeroshard.engine.observing import Observer
from zeroshard.engine.planning import make_plan
from zeroshard.engine.saving.save_options import SaveOptions
from zeroshard.engine.settings import Settings
from zeroshard.engine.step.schedule import Schedule, check_schedule
from zeroshard.errors import ConfigError, UsageError, ZeroShardWarning
from zeroshard.mesh import REPLICATE, SHARD, Mesh, MeshAxis
from zeroshard.observe.build import build_observer, check_packages
from zeroshard.optim.clients import client_source
from zeroshard.optim.configured import configured_source
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.schedules.named import build_scheduler
from zeroshard.optim.sources import Source
from zeroshard.parallel.divided_attention import divide_attention, find_transformers_model
from zeroshard.parallel.requested import SIZE, agreed_mesh, answers_sequence, requested_sequence
from zeroshard.parallel.sequence_axis import SequenceParallel
from zeroshard.pipeline.engine import PipelineCalls, PipelineEngine
from zeroshard.pipeline.start import PipelineStart, find_pipeline, find_vertical
from zeroshard.pipeline.vertical_engine import VerticalCalls, VerticalEngine
from zeroshard.plan.dtypes import dtype_name, torch_dtype
from zeroshard.recipes import mesh_of, recipe_of
from zeroshard.sharding.activations import checkpoint_activations, is_checkpointed
from zeroshard.sharding.dtensors import axes_of_model, data_ranks, mesh_with_model, tensor_ranks
from zeroshard.sharding.marks import (
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
)
from zeroshard.sharding.replaced import replace_in_optimizer, replace_members
from zeroshard.sharding.sharded_init import outside_of_init
from zeroshard.sharding.shared_memory import refuse_shared_memory
from zeroshard.sharding.units import refuse_uninitialized

ClientOptimizer = torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer]
ClientScheduler = Any
AnyEngine = TypeVar("AnyEngine", bound=Engine)
Result = tuple[Engine, "ShardedOptimizer | None", "DataLoader[Any] | None", Any]


@dataclass(frozen=True)
class EngineKinds(Generic[AnyEngine]):
    """Classes of engines: for backwards one by one, for pipelines, and for blocks in the vertical schedule."""

    plain: type[AnyEngine]
    pipeline: type[AnyEngine]
    vertical: type[AnyEngine]


_KINDS = EngineKinds[Engine](Engine, PipelineEngine, VerticalEngine)


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
        distributed_port: where rank 0 listens if no group exists and the environment does not say.
        dist_init_required: True makes a process group even for one process; False says that the caller has made one,
            and is an error where nobody has. By default the group of the launcher's environment is joined, if there
            is one.
        lr_scheduler: a torch scheduler over `optimizer`, or a callable from optimizer to one.
        config: dict, path or JSON text (`config_params` is its older name).

    Returns:
        Engine, optimizer, loader and scheduler; what there is none of is None. The engine of a PipelineModule has
        `train_batch` and `eval_batch`.

    Raises:
        ConfigError: the config, with the JSON path of each fault.
        PlanError, UsageError: what can't be put together.
    """
    return build_engine(
        _KINDS,
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=config,
        mesh_param=mesh_param,
        config_params=config_params,
    )


def build_engine(
    kinds: EngineKinds[AnyEngine],
    *,
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
) -> tuple[AnyEngine, ShardedOptimizer | None, DataLoader[Any] | None, Any]:
    """As `initialize`, with an engine of another class. A model of an `Init` that is still open is built first."""
    with outside_of_init(model):
        return _build_engine(
            kinds,
            args,
            model,
            optimizer,
            model_parameters,
            training_data,
            lr_scheduler,
            distributed_port,
            mpu,
            dist_init_required,
            collate_fn,
            config,
            mesh_param,
            config_params,
        )


def _build_engine(
    kinds: EngineKinds[AnyEngine],
    args: Any,
    model: nn.Module | None,
    optimizer: ClientOptimizer | None,
    model_parameters: Iterable[Any] | None,
    training_data: Dataset[Any] | None,
    lr_scheduler: ClientScheduler | None,
    distributed_port: int,
    mpu: Any,
    dist_init_required: bool | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    config: ConfigSource | None,
    mesh_param: Any,
    config_params: ConfigSource | None,
) -> tuple[AnyEngine, ShardedOptimizer | None, DataLoader[Any] | None, Any]:
    if model is None:
        raise UsageError("initialize needs a model")
    need_kind(model, nn.Module, "the model", "an nn.Module")
    _join(dist_init_required, distributed_port)
    document = _config_source(args, config, config_params)
    named = mesh_param if mpu is None or answers_sequence(mpu) else mpu
    replaced = divide_model(model, document, named, default_device().type)
    pipeline = find_pipeline(model, mpu, mesh_param)
    mesh = _mesh(model, None if answers_sequence(mpu) else mpu, mesh_param) if pipeline is None else pipeline.mesh
    mesh = _divide_sequences(model, document, mpu, mesh)
    world = data_ranks(model, mesh) if pipeline is None else pipeline.mesh.data_parallel_size
    said: dict[str, Any] = {"world_size": world, "same_batch": tensor_ranks(model, mesh)}
    said |= {"client_optimizer": optimizer is not None, "client_scheduler": lr_scheduler is not None}
    resolved = load_config(document, **said)
    if pipeline is not None:
        pipeline.obey(resolved)
    inner = find_transformers_model(model)
    vertical = find_vertical(model, inner, resolved, mesh) if pipeline is None else None
    if resolved.log_level is not None:
        logging.getLogger("zeroshard").setLevel(resolved.log_level.upper())
    check_packages(resolved.observe)
    device = default_device()
    refuse_uninitialized(model)
    refuse_shared_memory(model)
    if model_parameters is not None:
        need_kind(model_parameters, Iterable, "initialize(model_parameters=...)", "an iterable of parameters or groups")
    parameters = list(model_parameters) if model_parameters is not None else None
    if replaced and parameters is not None:
        parameters = replace_members(parameters, replaced)
    replace_in_optimizer(optimizer, replaced)
    source = _source(resolved, model, optimizer, parameters)
    _mark_leaves(model, resolved.zero.leaf_modules)
    _checkpoint(model, resolved.activations)
    if resolved.zero.stage == "auto":
        example = example_from(training_data, collate_fn, resolved.batch.micro)
        read = partial(resolve, **said)
        resolved = read(chosen_document(model, document, resolved, read, source, device, example, mesh)).config
    scaler = _scaler(resolved, device)
    sharded = _shard(model, resolved, source, scaler, device, mesh, pipeline)
    observer = None
    try:
        _cast_buffers(model, resolved.precision.buffer)
        scheduler = _scheduler(resolved, sharded, lr_scheduler)
        observer = build_observer(resolved.observe, handle_of(model))
        kind = kinds.pipeline if pipeline is not None else kinds.plain if vertical is None else kinds.vertical
        engine = kind(model, sharded, scheduler, _batch_sizes(resolved), _engine_options(resolved, observer))
        if observer is not None:
            weakref.finalize(engine, observer.close)
        if isinstance(engine, PipelineCalls):
            engine.run_schedule(resolved.pipeline.schedule)
        if isinstance(engine, VerticalCalls):
            assert vertical is not None
            engine.run_blocks(vertical.model, vertical.blocks)
        loader = engine.deepspeed_io(training_data, collate_fn=collate_fn) if training_data is not None else None
        if resolved.checkpoint.directory is not None:
            engine.save_on_sigterm(resolved.checkpoint.directory)
        if sharded is not None and (session := current_session()) is not None:
            engine.join(session, resolved.checkpoint.memory_steps)
    except BaseException:
        if observer is not None:
            observer.close()
        close(model)  # else no other call could shard it
        raise
    return engine, sharded, loader, scheduler


def _join(required: bool | None, port: int) -> None:
    """Join the process group that the launcher's environment describes, unless that has been done.

    Without such an environment this process trains alone, without a group; with `required` in a group of one. Raises
    UsageError where `required` is False and there is no group: each rank would train by itself without a word.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    if required is False:
        raise UsageError(
            "initialize(dist_init_required=False): there is no process group, and every rank would train alone; call "
            "zeroshard.init_distributed() or torch.distributed.init_process_group() before, or leave "
            "dist_init_required out"
        )
    if required or rank_place(os.environ, port) is not None:
        init_distributed(distributed_port=port)


def _divide_sequences(model: nn.Module, document: ConfigSource, mpu: Any, mesh: Mesh | None) -> Mesh | None:
    """Let the model's attention exchange where sequences are divided; the mesh with their axis."""
    size = read_document(document, Problems()).root.get(SIZE)
    sequence = requested_sequence(size if type(size) is int else 1, mpu, mesh)
    if sequence is None:
        return mesh
    mesh = mesh_with_model(model, agreed_mesh(mesh, sequence.axis, divided=bool(axes_of_model(model))))
    if sequence.exchanges and (isinstance(mpu, SequenceParallel) or find_transformers_model(model) is not None):
        divide_attention(model, sequence.axis.group, sequence.core, disable_in_eval=sequence.disable_in_eval)
    return mesh


def _mesh(model: nn.Module, mpu: Any, mesh_param: Any) -> Mesh | None:
    """The mesh that a caller names in either place. Raises PlanError where the model is divided over another."""
    if mpu is not None and mesh_param is not None:
        raise UsageError("initialize: give mpu or mesh_param, not both")
    given, name = (mpu, "mpu") if mesh_param is None else (mesh_param, "mesh_param")
    if given is None:
        return None
    if isinstance(given, tuple) and len(given) == 2 and all(type(size) is int for size in given):
        data, other = given
        axis = next(iter(axes_of_model(model)), "sp")
        return mesh_with_model(model, Mesh((MeshAxis(REPLICATE, 1), MeshAxis(SHARD, data), MeshAxis(axis, other))))
    if not isinstance(given, DeviceMesh):
        raise UsageError(
            f"initialize({name}=...): a torch DeviceMesh is needed, or two sizes (data and tensor, or data and "
            f"sequence), not a {type(given).__name__}; for a pipeline build the model as a PipelineModule"
        )
    mesh = mesh_from(given)
    if find_stage(mesh) is not None:
        raise UsageError(
            f"initialize({name}=...): the mesh ({mesh}) has pipeline stages; build the model as a PipelineModule, or "
            "hand this rank's layers to zeroshard.shard(..., mesh=mesh)"
        )
    return mesh_with_model(model, mesh)


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


def _checkpoint(model: nn.Module, wanted: ActivationConfig) -> None:
    """Checkpoint the blocks that the config asks for, once, and tell calls of `checkpoint` how they are made."""
    checkpointing.apply(checkpointing.settings_of(wanted))
    if wanted.policy == "calls" or is_checkpointed(model):
        return
    selective = wanted.policy == "selective"
    checkpoint_activations(model, number=wanted.number, selective=selective, on_host=wanted.on_host)


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
    source: Source | None,
    scaler: LossScaler | None,
    device: torch.device,
    mesh: Mesh | None,
    pipeline: PipelineStart | None,
) -> ShardedOptimizer | None:
    recipe = recipe_of(config, kept_in_fp32(model))
    if pipeline is not None:
        mesh = pipeline.divided(config.zero.subgroup)
        recipe = pipeline.recipe(recipe, config.pipeline.schedule)
    if mesh is None:
        mesh = mesh_with_model(model, None, config.zero.subgroup)
    elif config.zero.subgroup is not None and mesh.size((SHARD,)) != config.zero.subgroup:
        raise UsageError(
            f"initialize: the config divides ranks in subgroups of {config.zero.subgroup} "
            f"({mesh_of(config)}), but the mesh that was given is {mesh}; leave one of them out"
        )
    recipe = replace(recipe, sharding=recipe.sharding.on(mesh))
    plan = make_plan(model, recipe, source, device, mesh=mesh)
    if pipeline is None:
        return build_optimized(model, plan, source, scaler=scaler, device=device)[1]
    place, tied = pipeline.place(mesh), pipeline.model.tied
    return build_optimized(model, plan, source, scaler=scaler, device=device, place=place, tied=tied)[1]


def _cast_buffers(model: nn.Module, wanted: str | None) -> None:
    """Give floating-point buffers the dtype of the config; those of a deferred model have values only once sharded."""
    if wanted is None:
        return
    dtype = torch_dtype(dtype_name(wanted))
    cast: dict[int, torch.Tensor] = {}  # a buffer that two modules share stays one
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                cast.setdefault(id(buffer), buffer.to(dtype))
                module._buffers[name] = cast[id(buffer)]


def _source(
    config: Config, model: nn.Module, client: ClientOptimizer | None, parameters: list[Any] | None
) -> Source | None:
    trained = parameters if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    if client is not None:
        return client_source(client, trained, allow_untested=config.allow_untested_optimizer)
    if config.optimizer is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return configured_source(config.optimizer.type, config.optimizer.params, trained, names)
    warnings.warn(
        "initialize: neither the config nor the call names an optimizer; the engine can run forward only",
        ZeroShardWarning,
        stacklevel=5,
    )
    return None


def _scheduler(config: Config, optimizer: ShardedOptimizer | None, client: ClientScheduler | None) -> Any:
    if client is not None:
        made = isinstance(client, Schedule) and not isinstance(client, type)  # a class has the methods, too
        scheduler = client if made or not callable(client) else client(optimizer)
        check_schedule(scheduler, optimizer)
        return scheduler
    if config.scheduler is None:
        return None
    if optimizer is None:
        raise ConfigError("scheduler: there is no optimizer whose learning rate it could set")
    return build_scheduler(optimizer, config.scheduler.type, config.scheduler.params)


def _batch_sizes(config: Config) -> BatchSizes:
    return BatchSizes(config.batch.train, config.batch.micro, config.batch.accumulation)


def _engine_options(config: Config, observer: Observer | None) -> EngineOptions:
    autocast = config.precision.autocast
    return EngineOptions(
        accumulate_dtype=config.precision.grad_accum,
        autocast=None if autocast is None else torch_dtype(dtype_name(autocast)),
        loader=LoaderOptions(drop_last=config.drop_last),
        saving=SaveOptions(
            config.checkpoint.background,
            config.checkpoint.keep,
            config.checkpoint.directory,
            config.checkpoint.tag_validation,
            config.checkpoint.encryption_key,
            config.checkpoint.audit,
            config.checkpoint.on_failure == "raise",
            config.checkpoint.remote,
            config.checkpoint.signing_key,
            config.checkpoint.signed_by,
        ),
        steps_per_print=config.steps_per_print,
        clip_value=config.gradient_clip_value,
        ignore_unused=config.zero.ignore_unused,
        check_every_pass=config.zero.check_every_pass,
        observer=observer,
        counts_micro_batches=config.batch.managed,
        settings=Settings(0 if config.zero.stage == "auto" else config.zero.stage, config.precision.compute),
    )
