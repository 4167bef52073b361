"""Makes the plan for the running ranks from the argument of `shard`: a stage, a recipe or a finished plan.

    argument -> recipe -> the optimizer's needs -> choices for this machine -> plan -> copies between GPUs

This module adds to the recipe what depends on the machine and the optimizer; `plan.builder` depends on neither.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zeroshard.comm.reach import gpus_reachable
from zeroshard.errors import PlanError
from zeroshard.fp8.convert import described
from zeroshard.fp8.products import check_device
from zeroshard.mesh import DATA, Mesh
from zeroshard.optim.host.choose import processor_keeps_up
from zeroshard.optim.sources import Source
from zeroshard.plan.builder import Recipe, build_plan, for_gpu, with_peer_copies
from zeroshard.plan.check import peer_problem
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import HostUpdate
from zeroshard.plan.products import with_products
from zeroshard.sharding.dtensors import mesh_with_model
from zeroshard.sharding.units import find_units

_LOGGER = logging.getLogger("zeroshard")
_PLANS = "a stage from 0 to 3, a Recipe, a Plan, an AutoPlan, or 'auto' is needed"


def stage_recipe(plan: Plan | Recipe | int, mesh: Mesh) -> Plan | Recipe | int:
    """The plan argument for a pipeline stage on its `mesh`, without copies between GPUs, which need a single mesh."""
    if isinstance(plan, int) and plan in STAGES:
        plan = Recipe(sharding=STAGES[plan].on(mesh))
    return replace(plan, peer_copies=False) if isinstance(plan, Recipe) else plan


def make_plan(
    model: nn.Module,
    plan: Plan | Recipe | int,
    source: Source | None,
    device: torch.device,
    units: Sequence[str] | None = None,
    mesh: Mesh | None = None,
    *,
    accumulate: bool | None = None,
    micro_batches: int | None = None,
    clip_norm: float | None = None,
) -> Plan:
    """The plan for `model` on the ranks that are running; their axes are the data's and the model's own, or `mesh`."""
    mesh = mesh_with_model(model, None) if mesh is None else mesh
    asked = {"accumulate": accumulate, "micro_batches": micro_batches, "clip_norm": clip_norm}
    changes = {name: value for name, value in asked.items() if value is not None}
    if isinstance(plan, Plan):
        return _finished_plan(plan, source, changes)
    recipe = _with_products(_recipe_of(plan, mesh, changes), model, device)
    recipe = _for_optimizer(recipe, model, source)
    recipe = _for_machine(recipe, model, source, device)
    made = _with_reachable_peers(build_plan(find_units(model, units), recipe, mesh), recipe, device)
    check_wide(made, source)
    return made


def _finished_plan(plan: Plan, source: Source | None, changes: Mapping[str, Any]) -> Plan:
    """A finished plan, with the other arguments of the caller."""
    if changes.get("accumulate", plan.policy.accumulate) != plan.policy.accumulate:
        raise PlanError("accumulate: a finished plan has its accumulators fixed; set it in the recipe")
    if changes.get("micro_batches", plan.policy.micro_batches) != plan.policy.micro_batches:
        raise PlanError("micro_batches: a finished plan has its slots fixed; set it in the recipe's policy")
    _check_state_of(plan, source)
    check_wide(plan, source)
    return plan.with_policy(**changes) if changes else plan


def _check_state_of(plan: Plan, source: Source | None) -> None:
    """Raises PlanError where a finished plan counts other state or sums than the optimizer has."""
    if source is None:
        return
    for name, value in (("parameter_sums", source.parameter_sums), ("parameter_maxima", source.parameter_maxima)):
        if getattr(plan.policy, name) != value:
            raise PlanError(f"policy.{name} is {getattr(plan.policy, name)} in the plan, but {source.name} has {value}")
    for unit, group in plan.groups():
        if not group.trainable:
            continue
        if group.compressed != (source.compressed is not None):
            what = "sends gradients" if group.compressed else "sends compressed momentum in place of gradients"
            raise PlanError(
                f"unit {unit.label!r}: compressed is {group.compressed} in the plan, but {source.name} {what}; make "
                f"the plan with Recipe(compressed={not group.compressed})"
            )
        if group.factor_ranks and not source.factor_ranks:
            raise PlanError(f"unit {unit.label!r}: factor_ranks of the plan are for Dion, not for {source.name}")
        copies = 0 if group.moments is None else group.moments.copies
        if copies != source.moments and not source.matrices:
            raise PlanError(
                f"unit {unit.label!r}: the plan has {copies} state tensors per parameter (moments), but {source.name} "
                f"keeps {source.moments}; make the plan with Recipe(moments={source.moments})"
            )


def _recipe_of(plan: Recipe | int, mesh: Mesh, changes: Mapping[str, Any]) -> Recipe:
    """The recipe that the caller names."""
    if isinstance(plan, int) and not isinstance(plan, bool):
        if plan not in STAGES:
            raise PlanError(f"plan={plan}: ZeRO has stages 0, 1, 2 and 3")
        plan = Recipe(sharding=STAGES[plan].on(mesh))
    if not isinstance(plan, Recipe):
        raise PlanError(f"plan={plan!r}: {_PLANS}")
    return replace(plan, policy=replace(plan.policy, **changes))


def _with_products(recipe: Recipe, model: nn.Module, device: torch.device) -> Recipe:
    """The recipe with the layers that multiply in fp8, if it asks for fp8; the choices are logged."""
    if recipe.precision.matmul is None:
        return recipe
    check_device(device, recipe.precision.matmul.scaling)
    made, choices = with_products(recipe, model)
    for line in described(choices):
        _LOGGER.info("%s", line)
    if made.policy.products is None:
        reasons = "; ".join(line.removeprefix("fp8: ") for line in described(choices))
        _LOGGER.warning("fp8: no layer takes part; the model computes as without it (%s)", reasons or "it has none")
    return made


def _for_optimizer(recipe: Recipe, model: nn.Module, source: Source | None) -> Recipe:
    """The recipe with the state that the optimizer keeps for each parameter, and what it sends."""
    if source is None:
        return replace(recipe, moments=0)
    sums = replace(recipe.policy, parameter_sums=source.parameter_sums, parameter_maxima=source.parameter_maxima)
    made = replace(
        recipe,
        policy=sums,
        moments=source.moments,
        matrices=_names(model, source.matrices),
        factor_ranks={name: source.factor_ranks[id(p)] for name, p in _named(model, source.factor_ranks)},
        compressed=source.compressed is not None,
        blocks=source.blocks,
    )
    _check_compressed(made, source.name)
    return made


def _for_machine(recipe: Recipe, model: nn.Module, source: Source | None, device: torch.device) -> Recipe:
    """The recipe with its open choices made for this machine."""
    wide = recipe.precision.param is None and _has_wide(model)
    recipe = _with_update(recipe, None if wide else source, device)
    if device.type != "cuda":
        return recipe
    split = source is not None and source.split_master and not wide
    by_processor = recipe.offload is not None and recipe.offload.update is HostUpdate.PROCESSOR
    return for_gpu(recipe, split_master=split and not by_processor)


def _with_reachable_peers(plan: Plan, recipe: Recipe, device: torch.device) -> Plan:
    """The plan with copies between GPUs, if these reach each other and the recipe leaves the choice open."""
    asked = device.type == "cuda" and recipe.peer_copies is None and peer_problem(plan) is None
    return with_peer_copies(plan) if asked and gpus_reachable(device) else plan


def is_wide(plan: Plan) -> bool:
    """Whether some trainable parameters are float64."""
    return any(group.trainable and group.param.dtype == "float64" for _, group in plan.groups())


def check_wide(plan: Plan, source: Source | None) -> None:
    """Raises PlanError where the optimizer would update float64 parameters through float32."""
    if source is None or not is_wide(plan):
        return
    name = next(
        group.layout.segments[0].name
        for _, group in plan.groups()
        if group.trainable and group.param.dtype == "float64"
    )
    streamed = HostUpdate.STREAMED in plan.updates
    if streamed or not source.float64_exact:
        what = "state that passes through the GPU" if streamed else source.name
        raise PlanError(
            f"parameter {name!r} is float64, but {what} is computed in float32: use Adam, AdamW, SGD, Adagrad, RMSprop "
            "or another of torch's element-wise optimizers, with state on the device or updated by the processor, or "
            "make the parameter float32"
        )


def check_update(plan: Plan, source: Source | None) -> None:
    """Raises PlanError where the optimizer can't update state that the plan keeps in host memory."""
    if HostUpdate.PROCESSOR in plan.updates and (source is None or source.on_host is None):
        raise PlanError("offload: this optimizer can't update state in host memory")
    streams = source is not None and (source.streamed is not None or source.passing is not None)
    if HostUpdate.STREAMED in plan.updates and not streams:
        raise PlanError("offload: this optimizer has no kernel that streamed state could pass through")


def _with_update(recipe: Recipe, source: Source | None, device: torch.device) -> Recipe:
    """The recipe with the choice of what updates state in host memory, if it is open.

    The GPU does if it has a kernel for this optimizer and the processor is too slow; see `processor_keeps_up`. Moments
    in few bits always pass the device: the processor has no kernel for them.
    """
    if recipe.offload is None or recipe.offload.update is not None:
        return recipe
    if source is not None and source.passing is not None:
        return replace(recipe, offload=replace(recipe.offload, update=HostUpdate.STREAMED))
    on_disk = recipe.offload.on_disk  # state on disk passes through host memory anyway
    streamed = not on_disk and device.type == "cuda" and source is not None and source.on_device is not None
    streamed = streamed and not (source is not None and source.on_host is not None and processor_keeps_up())
    update = HostUpdate.STREAMED if streamed else HostUpdate.PROCESSOR
    return replace(recipe, offload=replace(recipe.offload, update=update))


def _check_compressed(recipe: Recipe, name: str) -> None:
    """Raises PlanError where a recipe does not leave each rank its whole gradients, which are never averaged."""
    if not recipe.compressed:
        return
    if any(row.grad or row.param or row.axes != DATA for row in (recipe.sharding, *recipe.overrides.values())):
        raise PlanError(
            f"{name} sends compressed momentum in place of gradients, which each rank keeps whole: it runs at stages 0 "
            "and 1 only"
        )
    if recipe.policy.clip_norm:
        raise PlanError(
            f"{name} can't clip by the gradients' norm: after its warm-up they are never averaged. Set "
            "gradient_clipping (clip_norm) to 0"
        )


def _has_wide(model: nn.Module) -> bool:
    return any(parameter.dtype == torch.float64 and parameter.requires_grad for parameter in model.parameters())


def _names(model: nn.Module, members: Collection[int]) -> tuple[str, ...]:
    """Names of the parameters whose id is in `members`."""
    return tuple(name for name, _ in _named(model, members))


def _named(model: nn.Module, members: Collection[int]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters whose id is in `members`, with their names."""
    return ((name, parameter) for name, parameter in model.named_parameters() if id(parameter) in members)
