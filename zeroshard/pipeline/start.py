"""What `initialize` does with a PipelineModule: its mesh, what a config asks of it, and what its plan needs.

The module has built its layers by the time the config is read. So what the config says of stages and partitions is
compared with it, and a difference is an error: to build other layers then would leave the script's parameters behind.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.comm.stages import StagePlace, find_stage
from zeroshard.config.resolved import Config
from zeroshard.engine.build import default_device
from zeroshard.errors import ConfigError, UsageError, ZeroShardWarning
from zeroshard.mesh import DATA, MODEL_AXES, REPLICATE, SHARD, Mesh, MeshAxis
from zeroshard.pipeline.module import PipelineModule
from zeroshard.pipeline.pretrained_blocks import pretrained_blocks
from zeroshard.pipeline.schedules import VERTICAL, splits_backward
from zeroshard.pipeline.topology import PipelineParallelGrid
from zeroshard.plan.builder import Recipe
from zeroshard.sharding.dtensors import axes_of_model, mesh_with_model, refuse_unused


@dataclass(frozen=True)
class PipelineStart:
    """A PipelineModule that is to be trained, and its mesh."""

    model: PipelineModule
    mesh: Mesh

    def obey(self, config: Config) -> None:
        """Take over what a config says of the pipeline.

        Raises:
            ConfigError: it says another thing than the module was built with, or asks for what is not built.
        """
        model, asked = self.model, config.pipeline
        if asked.stages not in (None, model.num_stages):
            raise ConfigError(
                f"pipeline.stages is {asked.stages}, but the PipelineModule was built with {model.num_stages} stages; "
                "change one of them, or leave the key out"
            )
        if asked.partition is not None and asked.partition.lower() != model.partition_method.lower():
            raise ConfigError(
                f"pipeline.partition is {asked.partition!r}, but the PipelineModule was built with partition_method="
                f"{model.partition_method!r}; change one of them, or leave the key out"
            )
        if asked.seed_layers and not model.seed_layers:
            raise ConfigError(
                "pipeline.seed_layers is true, but the PipelineModule has built its layers without seeds: say "
                "PipelineModule(..., seed_layers=True)"
            )
        _refuse_unbuilt(config)
        if asked.checkpoint_interval:
            model.activation_checkpoint_interval = asked.checkpoint_interval
        model.use_reentrant = asked.reentrant
        self._check_stages()

    def _check_stages(self) -> None:
        """Raises an error on all ranks where a stage has nothing to train, or an axis has nothing to divide."""
        model = self.model
        mesh_with_model(model, self.mesh)
        told = torch.zeros(model.num_stages + len(MODEL_AXES), dtype=torch.int64, device=default_device())
        told[model.stage_id] = int(model.has_trained())
        for place, axis in enumerate(MODEL_AXES, model.num_stages):
            told[place] = int(axis in axes_of_model(model))
        if dist.is_initialized():
            dist.all_reduce(told)
        counts = told.tolist()
        for stage, count in enumerate(counts[: model.num_stages]):
            if not count:
                raise UsageError(
                    f"PipelineModule: stage {stage} of {model.num_stages} (layers {model.layers_of(stage)}) has no "
                    "trained parameters; use fewer stages, or partition_method='parameters'"
                )
        used = [axis for axis, count in zip(MODEL_AXES, counts[model.num_stages :], strict=True) if count]
        refuse_unused(self.mesh.of_stage(), used)

    def divided(self, subgroup: int | None) -> Mesh:
        """The mesh of this rank's stage, in subgroups of a size. Raises PlanError where that does not divide it."""
        own = self.mesh.of_stage()
        if subgroup is None:
            return own
        data = Mesh.data_parallel(own.size(DATA), subgroup)
        return Mesh((*data.axes, *(axis for axis in own.axes if axis.name not in DATA)))

    def place(self, own: Mesh) -> StagePlace | None:
        """This rank's place among the stages, each of them the mesh `own`; None for a single stage."""
        sizes = {axis.name: axis.size for axis in own.axes}
        axes = [MeshAxis(axis.name, sizes.get(axis.name, axis.size)) for axis in self.mesh.axes]
        return find_stage(Mesh(tuple(axes)))

    def recipe(self, recipe: Recipe, schedule: str) -> Recipe:
        """The recipe of a stage: each chunk's backward is one of several in a step, and copies are for one mesh."""
        several = schedule != VERTICAL and (self.model.chunks > 1 or splits_backward(schedule))
        policy = replace(recipe.policy, accumulate=True) if several else recipe.policy
        return replace(recipe, policy=policy, peer_copies=False if self.model.num_stages > 1 else recipe.peer_copies)


def find_pipeline(model: nn.Module, mpu: Any, mesh_param: Any) -> PipelineStart | None:
    """The start of a PipelineModule; None for any other model.

    Raises:
        UsageError: the caller names another mesh, or the grid of a pipeline for another model.
    """
    named = mpu if mesh_param is None else mesh_param
    if not isinstance(model, PipelineModule):
        if isinstance(named, PipelineParallelGrid):
            raise UsageError(
                f"initialize: a PipelineParallelGrid was given, and the model is a {type(model).__name__}; build the "
                "model as a PipelineModule, or give a torch DeviceMesh"
            )
        return None
    if named is not None and not isinstance(named, PipelineParallelGrid):
        raise UsageError(
            "initialize: a PipelineModule has its mesh from num_stages or topology; leave mpu and mesh_param out"
        )
    mesh = model.topology().mesh()
    assert mesh.among(DATA) == (REPLICATE, SHARD)
    return PipelineStart(model, mesh)


@dataclass(frozen=True)
class VerticalStart:
    """A language model of transformers, and its blocks, through which all micro-batches of a step are to pass."""

    model: nn.Module
    blocks: list[nn.Module]


def find_vertical(model: nn.Module, inner: nn.Module | None, config: Config, mesh: Mesh | None) -> VerticalStart | None:
    """The blocks of a model that is no PipelineModule, where a config asks for the vertical schedule; else None.

    Args:
        inner: the model of transformers in it, if there is one.

    Raises:
        ConfigError: it is no model of transformers, or the config asks for what is not built.
        PlanError: the model brings no plan of stages.
    """
    if config.pipeline.schedule != VERTICAL:
        return None
    if inner is None:
        raise ConfigError(
            f"pipeline.schedule 'vertical': a {type(model).__name__} is called as a whole; write it as a "
            "PipelineModule(layers, num_stages=1), whose train_batch() lets all micro-batches pass a layer before the "
            "next one, or use the native interface: zeroshard.VerticalSchedule(model, loss_fn, blocks=[...])"
        )
    axes = () if mesh is None else mesh.axes
    others = [*axes_of_model(model), *(axis.name for axis in axes if axis.name not in DATA and axis.size > 1)]
    if others:
        raise ConfigError(
            f"pipeline.schedule 'vertical': the model or its sequences are divided over {others[0]!r}, and blocks of "
            "transformers' models are not run so yet; leave one of the two out"
        )
    _refuse_unbuilt(config)
    return VerticalStart(inner, pretrained_blocks(inner))


def _refuse_unbuilt(config: Config) -> None:
    """What steps of `train_batch` do not do yet: an error, or a warning where nothing is lost but figures."""
    if config.zero.stage == "auto":
        raise ConfigError('zero_optimization.stage "auto" is not built for pipelines; write a number from 0 to 3')
    if config.observe.flops is not None:
        raise ConfigError(
            "flops_profiler.enabled: FLOPs of pipelines are not counted yet; leave it out, or profile the model "
            "with get_model_profile"
        )
    if config.observe.breakdown:
        warnings.warn(
            "wall_clock_breakdown: a pipeline's forwards and backwards run in turn, and are not timed apart",
            ZeroShardWarning,
            stacklevel=5,
        )
