"""deepspeed.initialize: zeroshard's, with the engine that libraries expect."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

import zeroshard
from deepspeed import _config
from deepspeed._adalora import AdaptersBetweenSteps, find_adapters
from deepspeed._divided import begin_watch, with_tensor_ranks
from deepspeed._lightning import divides_loss
from deepspeed._optimizer import describe_optimizer, stand_for_client
from deepspeed._parameters import describe, enables_checks
from deepspeed._torchao import take_over
from deepspeed._version import VERSION
from deepspeed.runtime.engine import DeepSpeedEngine, leave
from deepspeed.runtime.pipe.engine import PipelineEngine, VerticalEngine
from deepspeed.runtime.zero.parameter_offload import ParameterOffload
from deepspeed.utils.logging import logger
from zeroshard.auto_config import ConfigSource
from zeroshard.config.document import Document
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.step.attached import stepper_of
from zeroshard.errors import UsageError, ZeroShardWarning
from zeroshard.from_config import EngineKinds, build_engine

_end_watch = begin_watch()  # accelerate reaches for `initialize` when it prepares a loader, before any forward


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: torch.utils.data.Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """As `zeroshard.initialize`; called by all ranks.

    A model that an engine runs already (a reference model that is to be trained now, or a model that goes from one
    Trainer to the next) leaves that engine first, with its weights.

    Returns:
        Engine, optimizer, loader and scheduler; what there is none of is None.
    """
    source = config if config is not None else config_params
    _end_watch()
    if source is None:
        source = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if source is None:
        raise UsageError("deepspeed.initialize needs a config: config=, config_params= or args.deepspeed_config")
    if config is not None and config_params is not None:
        raise UsageError("deepspeed.initialize: give config or config_params, not both")
    if model is not None:
        leave(model)
    optimizer = _unwrapped(optimizer)
    document = _config.read(source)
    raw = document.root
    parameters = list(model_parameters) if model_parameters is not None else None
    adapters = [] if model is None else find_adapters(model)
    for adapter in adapters:
        assert model is not None
        zeroshard.register_external_parameter(model, adapter)  # AdaLoRA's forward reads them all
    products = None if model is None else take_over(model, raw.get("fp8"))
    trains = optimizer is not None or "optimizer" in raw
    with warnings.catch_warnings():
        if not trains:  # the caller of a reference model knows that it can't be trained
            warnings.filterwarnings("ignore", "initialize: neither the config", ZeroShardWarning)
        engine, *others = build_engine(
            EngineKinds(DeepSpeedEngine, PipelineEngine, VerticalEngine),
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=parameters or None,
            training_data=training_data,
            lr_scheduler=lr_scheduler if trains else None,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=_understood(document, products, optimizer=optimizer is not None),
            mesh_param=mesh_param,
        )
    engine.adopt(raw)
    if divides_loss(model):
        engine.leave_division()
    handle_of(engine.module).runtime.names_in_state_dict = True  # peft reads the names of modules_to_save there
    if engine.optimizer is not None:
        describe_optimizer(engine.optimizer, stepper_of(engine.module).scaler)
        if engine.zero_optimization_stage() == 0 and not (engine.bfloat16_enabled() or engine.fp16_enabled()):
            stand_for_client(engine.optimizer, torch_adam=_asks_torch_adam(raw))
        engine.optimizer.returns_groups = True  # Lightning asks for it in every checkpoint, and drops it
        if adapters:
            engine.adopt_adapters(AdaptersBetweenSteps(engine.module, adapters))
    stage_3 = engine.zero_optimization_stage() == 3
    describe(engine.module.parameters(), resident=stage_3, checked=enables_checks(raw))
    if engine.optimizer is not None and stage_3:
        engine.optimizer.__dict__["parameter_offload"] = ParameterOffload(engine.module)
    logger.info("DeepSpeed info: version=%s, zeroshard %s under DeepSpeed's name", VERSION, zeroshard.__version__)
    return (engine, *others)  # type: ignore[return-value]


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of accelerate's wrapper, which ParallelismConfig(tp_size=...) puts around it too early."""
    kind = type(optimizer)
    wrapped = (kind.__module__, kind.__name__) == ("accelerate.optimizer", "AcceleratedOptimizer")
    return optimizer.optimizer if wrapped else optimizer


def _understood(document: Document, products: Mapping[str, Any] | None, *, optimizer: bool) -> ConfigSource:
    """The config in the words of a user; one that was read from text keeps the lines of its values.

    Args:
        products: the section `fp8` of torchao's layers, if the model had some.
    """
    values = with_tensor_ranks(_config.understood(document.root, optimizer=optimizer), document.root)
    if products is not None:
        values["fp8"] = dict(products)
        if not (_enabled(values, "bf16") or _enabled(values, "fp16")):
            values["bf16"] = {"enabled": True}  # Trainer fills an "auto" with its own bf16, which fp8 leaves out
    return Document(values, document.label, document.lines) if document.lines else values


def _enabled(values: Mapping[str, Any], name: str) -> bool:
    section = values.get(name)
    return isinstance(section, Mapping) and bool(section.get("enabled"))


def _asks_torch_adam(config: Mapping[str, Any]) -> bool:
    section = config.get("optimizer")
    params = section.get("params") if isinstance(section, Mapping) else None
    beside = isinstance(section, Mapping) and bool(section.get("torch_adam"))
    return beside or (isinstance(params, Mapping) and bool(params.get("torch_adam")))
