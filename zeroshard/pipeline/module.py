"""A model as a list of layers, of which each rank builds those of its stage: DeepSpeed's `PipelineModule`.

    layers     0 1 | 2 3 | 4 5 | 6 7        chunks of one stage each, or several (`chunks`)
    stage      0   | 1   | 2   | 3          placement "loop":  0 1 0 1      placement "v":  0 1 1 0

Parameters have the layer's number in the whole model as their name, on whichever stage it is, so checkpoints of all
layouts are alike. Rejected: to trace a whole model and cut its graph, which builds on every rank what one needs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroshard.arguments import need_kind
from zeroshard.cluster import rank_place
from zeroshard.comm.join import init_distributed
from zeroshard.errors import UsageError
from zeroshard.pipeline.captured import reachable_parameters
from zeroshard.pipeline.layers import LayerSpec, TiedLayerSpec, TiedModule
from zeroshard.pipeline.partition import partition, weights_of
from zeroshard.pipeline.topology import PIPE, PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from zeroshard.sharding.marks import set_z3_leaf_module

Layer = Callable[..., Any]
Placement = Literal["loop", "v"]


class PipelineModule(nn.Module):
    """Consecutive layers of a model, those of this rank's stage; made by all ranks.

    Args:
        layers: of the whole model: LayerSpecs, modules, or functions. Each gets what the one before gives.
        num_stages: into how many stages the ranks are divided; or `topology` says it.
        loss_fn: called with the last layer's output and the labels; None where the last layer gives the loss.
        seed_layers: seed random numbers before each layer is built, by `base_seed` and its number, so that every
            partition starts from the same values; by `seed_fn`, or torch's and Python's own.
        partition_method: `uniform`, `parameters`, or `type:REGEX`.
        activation_checkpoint_interval: of so many layers in a row only the inputs are kept for the backward; 0 is none.
        activation_checkpoint_func: checkpoints, in place of torch's.
        checkpointable_layers: names of the classes that are; by default all with parameters.
        dynamic_shape: micro-batches of one step may differ in shape from those of the next.
        chunks: parts of the model on each stage, for interleaved schedules.
        placement: where they are: "loop" numbers them over the stages again and again, "v" there and back.

    Attributes:
        parts: the borders of all parts of the model, in layers.
        own: the numbers of this stage's parts, the first one first.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        chunks: int = 1,
        placement: Placement = "loop",
    ) -> None:
        super().__init__()
        self._topo = _topology(num_stages, topology)
        self._grid = PipelineParallelGrid(self._topo)
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.stage_id
        self.loss_fn, self.dynamic_shape = loss_fn, dynamic_shape
        self.seed_layers, self.base_seed, self._seed_fn = seed_layers, base_seed, seed_fn
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.use_reentrant = False
        self._checkpointable = checkpointable_layers
        self.chunks = chunks
        self.placement: Placement = placement
        self.own = _own_parts(self.num_stages, self.stage_id, chunks, placement)
        specs = [_checked(layer, number) for number, layer in enumerate(layers)]
        self._keys = [spec.key if isinstance(spec, TiedLayerSpec) else None for spec in specs]
        self.partition_method = partition_method
        self.parts = self._partition(specs, partition_method)
        self._check_shared(specs)
        self.tied_modules = nn.ModuleDict()
        self._calls = [[self._build(number, specs[number]) for number in self._numbers(part)] for part in self.own]
        for member in [*self.children(), *self.tied_modules.values()]:
            if member is not self.tied_modules:
                set_z3_leaf_module(member, True)  # each layer is gathered as a whole, and by itself

    @property
    def total_parts(self) -> int:
        """Parts of the whole model."""
        return self.num_stages * self.chunks

    @property
    def tied(self) -> list[str]:
        """Paths of this stage's modules that layers on several stages share."""
        return [f"tied_modules.{key}" for key in self.tied_modules if len(self._stages_of(key)) > 1]

    @property
    def forward_funcs(self) -> list[Layer]:
        """What this stage calls, one after the other."""
        return [call for calls in self._calls for call in calls]

    def topology(self) -> ProcessTopology:
        """All ranks as axes."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """This rank's place among them."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Stages."""
        return self.num_stages

    def has_trained(self) -> bool:
        """Whether this stage has parameters that are trained."""
        return any(parameter.requires_grad for parameter in self.parameters())

    def layers_of(self, stage: int) -> list[int]:
        """The numbers of the layers that a stage has."""
        parts = _own_parts(self.num_stages, stage, self.chunks, self.placement)
        return [number for part in parts for number in self._numbers(part)]

    def forward(self, *inputs: Any, chunk: int = 0) -> Any:
        """The output of one of this stage's parts."""
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        calls, every = self._calls[chunk], self.activation_checkpoint_interval
        if not every or not torch.is_grad_enabled():
            return _through(calls, value)
        for start in range(0, len(calls), every):
            value = self.through(calls[start : start + every], value)
        return value

    def through(self, calls: Sequence[Layer], value: Any) -> Any:
        """What some of `forward_funcs` in a row make of a value, computed again in the backward if layers are."""
        if self.activation_checkpoint_interval and torch.is_grad_enabled() and self._may_checkpoint(calls):
            return self._checkpointed(calls, value)
        return _through(calls, value)

    def _checkpointed(self, calls: Sequence[Layer], value: Any) -> Any:
        inputs = value if isinstance(value, tuple) else (value,)

        def run(*inputs: Any) -> Any:
            return _through(calls, inputs[0] if len(inputs) == 1 else inputs)

        if self.activation_checkpoint_func is not None:
            return self.activation_checkpoint_func(run, *inputs)
        return checkpoint(run, *inputs, use_reentrant=self.use_reentrant)

    def _may_checkpoint(self, calls: Sequence[Layer]) -> bool:
        modules = [_module_of(call) for call in calls]
        if self._checkpointable is not None:
            return all(type(module).__name__ in self._checkpointable for module in modules)
        return any(module is not None and next(module.parameters(), None) is not None for module in modules)

    def _numbers(self, part: int) -> range:
        return range(self.parts[part], self.parts[part + 1])

    def _stages_of(self, key: str) -> set[int]:
        return {
            stage for stage in range(self.num_stages) for number in self.layers_of(stage) if self._keys[number] == key
        }

    def _partition(self, specs: Sequence[Any], method: str) -> list[int]:
        names = [_name(spec) for spec in specs]
        counted = method.lower() == "parameters"
        sizes = [_trained(spec) if counted else 0 for spec in specs]
        try:
            return partition(weights_of(method, names, sizes), self.total_parts)
        except UsageError as error:
            if len(specs) >= self.total_parts:
                raise
            several = f" of {self.chunks} chunks each" if self.chunks > 1 else ""
            raise UsageError(
                f"PipelineModule: {len(specs)} layers for {self.num_stages} stages{several}: each needs at least "
                "one; use fewer stages"
            ) from error

    def _check_shared(self, layers: Sequence[Any]) -> None:
        """Refuse a trained parameter of layers on several stages: each would train a copy, by its own gradients."""
        found: dict[int, tuple[int, int]] = {}
        for stage in range(self.num_stages):
            for number in self.layers_of(stage):
                for name, parameter in reachable_parameters(layers[number]):
                    first, other = found.setdefault(id(parameter), (stage, number))
                    if first != stage and parameter.requires_grad:
                        raise UsageError(
                            f"PipelineModule: layers {other} (stage {first}) and {number} (stage {stage}) share "
                            f"parameter {name!r}, and would train copies of it apart; make both "
                            "TiedLayerSpec(key, ...) with the same key, or put them on one stage"
                        )

    def _build(self, number: int, spec: Any) -> Layer:
        """The layer of a number, kept under its name."""
        if self.seed_layers:
            self._seed(self.base_seed + number)
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in self.tied_modules:
                self.tied_modules[spec.key] = TiedModule(spec.build())
            return partial(self.tied_modules[spec.key], spec.forward_fn)
        layer = spec.build() if isinstance(spec, LayerSpec) else spec
        if isinstance(layer, nn.Module):
            self.add_module(str(number), layer)
        return layer

    def _seed(self, seed: int) -> None:
        if self._seed_fn is not None:
            self._seed_fn(seed)
            return
        random.seed(seed)
        torch.manual_seed(seed)


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    if not dist.is_initialized() and rank_place(os.environ) is not None:
        init_distributed()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if topology is not None:
        if num_stages is not None and num_stages != topology.get_dim(PIPE):
            raise UsageError(
                f"PipelineModule: num_stages={num_stages}, but the topology ({topology}) has {topology.get_dim(PIPE)} "
                "stages; leave one of them out"
            )
        return topology
    if num_stages is None:
        raise UsageError("PipelineModule: give num_stages or a topology")
    need_kind(num_stages, int, "PipelineModule(num_stages=...)", "a whole number")
    if num_stages < 1 or ranks % num_stages:
        raise UsageError(
            f"PipelineModule: num_stages={num_stages} does not divide the {ranks} ranks that are running; choose a "
            "number that does"
        )
    return PipeDataParallelTopology(num_stages, ranks // num_stages)


def _own_parts(stages: int, stage: int, chunks: int, placement: Placement) -> list[int]:
    """The numbers of a stage's parts among those of the whole model."""
    if chunks < 1 or (placement == "v" and chunks != 2):
        raise UsageError(f"PipelineModule(chunks={chunks}, placement={placement!r}): at least 1, and 2 for a 'v'")
    if placement == "v":
        return [stage, 2 * stages - 1 - stage]
    return [stage + stages * round_ for round_ in range(chunks)]


def _checked(layer: Any, number: int) -> Any:
    if isinstance(layer, (LayerSpec, nn.Module)) or callable(layer):
        return layer
    raise UsageError(
        f"PipelineModule: layer {number} is a {type(layer).__name__}; a LayerSpec, a module or a function is needed"
    )


def _name(layer: Any) -> str:
    """The name of a layer's class, or of the function that it is."""
    if isinstance(layer, LayerSpec):
        return layer.name
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def _trained(layer: Any) -> int:
    """How many elements of a layer are trained; a spec's are built to be counted, where possible without memory."""
    if isinstance(layer, LayerSpec):
        with torch.random.fork_rng(devices=[]):
            layer = _built_to_count(layer)
    if not isinstance(layer, nn.Module):
        return 0
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)


def _built_to_count(spec: LayerSpec) -> Any:
    try:
        with torch.device("meta"):
            return spec.build()
    except (NotImplementedError, RuntimeError):  # it computes with values while it is built
        return spec.build()


def _module_of(call: Layer) -> nn.Module | None:
    found = call.func if isinstance(call, partial) else call
    found = found.module if isinstance(found, TiedModule) else found
    return found if isinstance(found, nn.Module) else None


def _through(calls: Sequence[Layer], value: Any) -> Any:
    for call in calls:
        value = call(value)
    return value
