"""The native interface, in PyTorch's manner: shard the model and its optimizer, then write the plain loop.

model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan=3)
for batch in loader:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypedDict, overload

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack

from zeroshard.comm.peers import PeerMemoryFactory
from zeroshard.comm.reach import gpus_reachable
from zeroshard.engine.automatic import OFFLOADS, AutoPlan, assumed_example, choose, example_of, reachable
from zeroshard.engine.build import build_handle, default_device
from zeroshard.engine.closing import close_handle
from zeroshard.engine.compressed_stepper import CompressedStepper
from zeroshard.engine.device_stepper import DeviceStepper
from zeroshard.engine.gathered import mark_parameters
from zeroshard.engine.handle import Handle, find_handle, handle_of
from zeroshard.engine.host_state_stepper import HostStateStepper
from zeroshard.engine.step_base import StepperBase
from zeroshard.engine.stepper import HostStepper
from zeroshard.engine.storage import Group
from zeroshard.engine.streamed_stepper import StreamedStepper
from zeroshard.engine.streams import Streams
from zeroshard.errors import PlanError, UsageError
from zeroshard.optim.clients import client_source
from zeroshard.optim.host.choose import processor_keeps_up
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.regions import Region
from zeroshard.optim.segments import refuse_split
from zeroshard.optim.site import Site
from zeroshard.optim.sources import Source, check_parameters
from zeroshard.optim.updates import UNRULY
from zeroshard.plan.builder import Recipe, build_plan, for_gpu, with_peer_copies
from zeroshard.plan.offload import Offload, stream_buffer_nbytes
from zeroshard.plan.placement import STAGES, Tier
from zeroshard.plan.plan import HostUpdate, Plan, peer_problem
from zeroshard.planner.tiers import Offload as AwayTo
from zeroshard.sharding.units import find_units, refuse_uninitialized

_STEPPER = "_zeroshard_stepper"
_OPTIMIZER = "_zeroshard_optimizer"
OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer]
OptimizerSource = OptimizerLike | None

_PLANS = "a stage from 0 to 3, a Recipe, a Plan, an AutoPlan, or 'auto' is needed"


class ShardOptions(TypedDict, total=False):
    """The keyword arguments of `shard`, for its overloads."""

    plan: Plan | Recipe | AutoPlan | int | Literal["auto"]
    units: Sequence[str] | None
    shard_size: int | None
    accumulate: bool | None
    clip_norm: float | None
    scaler: LossScaler | None
    allow_untested: bool
    device: torch.device | None
    sync_parameters: bool
    streams: Streams | None
    peer_memory: PeerMemoryFactory | None


@overload
def shard(
    model: nn.Module, optimizer: OptimizerLike, **options: Unpack[ShardOptions]
) -> tuple[nn.Module, ShardedOptimizer]: ...


@overload
def shard(model: nn.Module, optimizer: None = None, **options: Unpack[ShardOptions]) -> tuple[nn.Module, None]: ...


def shard(
    model: nn.Module,
    optimizer: OptimizerSource = None,
    *,
    plan: Plan | Recipe | AutoPlan | int | Literal["auto"] = 3,
    units: Sequence[str] | None = None,
    shard_size: int | None = None,
    accumulate: bool | None = None,
    clip_norm: float | None = None,
    scaler: LossScaler | None = None,
    allow_untested: bool = False,
    device: torch.device | None = None,
    sync_parameters: bool = True,
    streams: Streams | None = None,
    peer_memory: PeerMemoryFactory | None = None,
) -> tuple[nn.Module, ShardedOptimizer | None]:
    """Shard `model` and its optimizer; called by all ranks. The model is changed in place and returned.

    Args:
        optimizer: a torch optimizer over the model's parameters that has not stepped yet, or a callable that makes one.
        plan: a ZeRO stage (0 to 3), a Recipe, a finished Plan, or "auto" or an AutoPlan: the planner chooses by what
            is free.
        units: module paths that are gathered as a whole, instead of the ones found.
        shard_size: ranks per subgroup, for units that the recipe places on the axis 'shard'.
        accumulate: whether several backwards happen per step; takes an accumulator into the plan.
        clip_norm: global gradient norm above which gradients are scaled down.
        scaler: loss scale for float16.
        allow_untested: accept an optimizer that is not known to be element-wise.
        device, sync_parameters, streams, peer_memory: see `build_handle`.

    Raises:
        PlanError, UsageError: what can't be put together, and how to mend it.
    """
    refuse_uninitialized(model)
    source = None
    if optimizer is not None:
        source = client_source(optimizer, model.parameters(), allow_untested=allow_untested)
    device = default_device() if device is None else device
    if isinstance(plan, (AutoPlan, str)):
        if isinstance(plan, str) and plan != "auto":
            raise PlanError(f"plan={plan!r}: {_PLANS}")
        auto = AutoPlan() if isinstance(plan, str) else plan
        plan = _chosen(model, auto, source, device, units, shard_size, accumulate=accumulate, clip_norm=clip_norm)
    made = make_plan(model, plan, source, device, units, shard_size, accumulate=accumulate, clip_norm=clip_norm)
    return build_optimized(
        model,
        made,
        source,
        scaler=scaler,
        device=device,
        sync_parameters=sync_parameters,
        streams=streams,
        peer_memory=peer_memory,
    )


def build_optimized(
    model: nn.Module,
    plan: Plan,
    source: Source | None,
    *,
    scaler: LossScaler | None = None,
    device: torch.device | None = None,
    sync_parameters: bool = True,
    streams: Streams | None = None,
    peer_memory: PeerMemoryFactory | None = None,
) -> tuple[nn.Module, ShardedOptimizer | None]:
    """Shard `model` by a finished plan and put the optimizer of `source` over it; called by all ranks."""
    if source is not None:
        check_parameters(source, model)
    handle = build_handle(
        model, plan, device=device, sync_parameters=sync_parameters, streams=streams, peer_memory=peer_memory
    )
    mark_parameters(handle)
    if source is None:
        return model, None
    return model, attach_optimizer(model, source, _stepper(handle, source, scaler))


def attach_optimizer(model: nn.Module, source: Source, stepper: StepperBase) -> ShardedOptimizer:
    """The optimizer of a sharded model whose steps `stepper` runs; the model knows both from here on."""
    optimizer = ShardedOptimizer(source.groups, source.defaults, stepper, source.name, source.client)
    model.__dict__[_STEPPER], model.__dict__[_OPTIMIZER] = stepper, optimizer
    stepper.groups = optimizer.param_groups
    return optimizer


def _stepper(handle: Handle, source: Source, scaler: LossScaler | None) -> StepperBase:
    """On a GPU what can runs without the host waiting; everything else is told by the host what to do."""
    update = handle.plan.policy.host_update
    site = make_site(handle, source.groups)
    _check_blocks(site, source)
    if update is HostUpdate.PROCESSOR:
        if source.on_host is None:
            raise PlanError(
                f"offload: {_in_full(source)} can't update state in host memory; use Adam, AdamW, Adagrad, Lion, "
                "RMSprop or SGD without any of torch's special options, or keep the state on the device"
            )
        return HostStateStepper(handle, source.on_host(site), scaler)
    if update is HostUpdate.STREAMED:
        return _streamed_stepper(handle, source, site, scaler)
    on_device = handle.device.type == "cuda" and source.on_device is not None
    if not (on_device and source.split_master):
        refuse_split(site.regions, source.name)
    if on_device:
        assert source.on_device is not None
        return DeviceStepper(handle, source.on_device(site), scaler)
    if source.compressed is not None:
        return CompressedStepper(handle, source.compressed(site), scaler)
    return HostStepper(handle, source.update(site), scaler)


def _in_full(source: Source) -> str:
    """An optimizer's name, with the options for which it is not updated by our rules."""
    options = [name for name in UNRULY if any(group.get(name) for group in source.groups)]
    options += ["an lr that is a tensor"] * any(isinstance(group.get("lr"), torch.Tensor) for group in source.groups)
    return source.name + (f" with {' and '.join(options)}" if options else "")


def _check_blocks(site: Site, source: Source) -> None:
    """Raises PlanError for a plan in whose memory the optimizer's moments don't lie; `low_bit` checks the contrary."""
    for region in site.regions:
        if region.blocks is not None and source.blocks is None:
            raise PlanError(
                f"the plan keeps moments of {region.label} in {region.blocks.bits} bits, but {source.name} has them in "
                "float32; make the plan without Recipe(blocks=...), or use an optimizer such as AdamW8bit"
            )


def _streamed_stepper(handle: Handle, source: Source, site: Site, scaler: LossScaler | None) -> StreamedStepper:
    """For state that passes through the device. Raises PlanError for an optimizer without a kernel for that."""
    if source.streamed is None:
        raise PlanError(
            f"offload: {source.name} has no kernel that streamed state could pass through; use Adam or AdamW"
        )
    buffers = [torch.empty(n, dtype=torch.uint8, device=handle.device) for n in stream_buffer_nbytes(handle.plan)]
    update = source.streamed(site, buffers, handle.plan.policy.stream_numel)
    return StreamedStepper(handle, update, scaler)


def _chosen(
    model: nn.Module,
    auto: AutoPlan,
    source: Source | None,
    device: torch.device,
    units: Sequence[str] | None,
    shard_size: int | None,
    *,
    accumulate: bool | None,
    clip_norm: float | None,
) -> Recipe:
    """The recipe that the planner chooses."""

    def recipe(stage: int, offload: AwayTo, share: float) -> Recipe:
        host = Offload(share, offload is AwayTo.CPU_PARAM) if offload is not AwayTo.NONE else None
        return dataclasses.replace(auto.recipe, sharding=STAGES[stage], offload=host)

    def make(stage: int, offload: AwayTo, more: bool, share: float) -> Plan:
        chosen = dataclasses.replace(recipe(stage, offload, share), peer_copies=False)
        adds = True if more else accumulate
        plan = make_plan(model, chosen, source, device, units, shard_size, accumulate=adds, clip_norm=clip_norm)
        check_update(plan, source)
        return with_peer_copies(plan) if peers and peer_problem(plan) is None else plan

    peers = reachable(device) and auto.recipe.peer_copies is not False
    example = example_of(auto.example) or assumed_example(model, 1, None)
    offloads = OFFLOADS if auto.offload else (AwayTo.NONE,)
    found = choose(model, find_units(model, units), make, example, device, limit=auto.device_memory, offloads=offloads)
    return recipe(found.stage, found.offload, found.share)


def check_update(plan: Plan, source: Source | None) -> None:
    """Raises PlanError where the optimizer can't update state that the plan keeps in host memory."""
    update = plan.policy.host_update
    if update is HostUpdate.PROCESSOR and (source is None or source.on_host is None):
        raise PlanError("offload: this optimizer can't update state in host memory")
    if update is HostUpdate.STREAMED and (source is None or source.streamed is None):
        raise PlanError("offload: this optimizer has no kernel that streamed state could pass through")


def make_plan(
    model: nn.Module,
    plan: Plan | Recipe | int,
    source: Source | None,
    device: torch.device,
    units: Sequence[str] | None = None,
    shard_size: int | None = None,
    *,
    accumulate: bool | None = None,
    clip_norm: float | None = None,
) -> Plan:
    """The plan for `model` on the ranks that are running."""
    changes: dict[str, Any] = {}
    if accumulate is not None:
        changes["accumulate"] = accumulate
    if clip_norm is not None:
        changes["clip_norm"] = clip_norm
    if isinstance(plan, Plan):
        if "accumulate" in changes and plan.policy.accumulate != accumulate:
            raise PlanError("accumulate: a finished plan has its accumulators fixed; set it in the recipe")
        return plan.with_policy(**changes)
    if isinstance(plan, int) and not isinstance(plan, bool):
        if plan not in STAGES:
            raise PlanError(f"plan={plan}: ZeRO has stages 0, 1, 2 and 3")
        plan = Recipe(sharding=STAGES[plan])
    if not isinstance(plan, Recipe):
        raise PlanError(f"plan={plan!r}: {_PLANS}")
    if source is not None:
        changes["parameter_sums"], changes["parameter_maxima"] = source.parameter_sums, source.parameter_maxima
        compressed = source.compressed is not None
        matrices = _names(model, source.matrices)
        plan = dataclasses.replace(plan, matrices=matrices, compressed=compressed, blocks=source.blocks)
        _check_compressed(dataclasses.replace(plan, policy=dataclasses.replace(plan.policy, **changes)), source.name)
    recipe = dataclasses.replace(
        plan, moments=source.moments if source else 0, policy=dataclasses.replace(plan.policy, **changes)
    )
    recipe = _with_update(recipe, source, device)
    if device.type == "cuda":
        by_processor = recipe.offload is not None and recipe.offload.update is HostUpdate.PROCESSOR
        recipe = for_gpu(recipe, split_master=source is not None and source.split_master and not by_processor)
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    made = build_plan(find_units(model, units), recipe, dp=world, shard=shard_size)
    if device.type == "cuda" and recipe.peer_copies is None and peer_problem(made) is None and gpus_reachable(device):
        made = with_peer_copies(made)
    return made


def _with_update(recipe: Recipe, source: Source | None, device: torch.device) -> Recipe:
    """Who updates state in host memory, where the recipe leaves that open.

    The GPU if it has a kernel for it and the processors are few; see `processor_keeps_up`.
    """
    if recipe.offload is None or recipe.offload.update is not None:
        return recipe
    streamed = device.type == "cuda" and source is not None and source.on_device is not None
    streamed = streamed and not (source is not None and source.on_host is not None and processor_keeps_up())
    update = HostUpdate.STREAMED if streamed else HostUpdate.PROCESSOR
    return dataclasses.replace(recipe, offload=dataclasses.replace(recipe.offload, update=update))


def _check_compressed(recipe: Recipe, name: str) -> None:
    """Raises PlanError where a recipe does not leave each rank its whole gradients, which are never averaged."""
    if not recipe.compressed:
        return
    if any(row.grad or row.param or row.axis != "dp" for row in (recipe.sharding, *recipe.overrides.values())):
        raise PlanError(
            f"{name} sends compressed momentum in place of gradients, which each rank keeps whole: it runs at stages 0 "
            "and 1 only"
        )
    if recipe.policy.clip_norm:
        raise PlanError(
            f"{name} can't clip by the gradients' norm: after its warm-up they are never averaged. Set "
            "gradient_clipping (clip_norm) to 0"
        )


def _names(model: nn.Module, members: Collection[int]) -> tuple[str, ...]:
    """Names of the parameters whose id is in `members`."""
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in members)


def make_site(handle: Handle, groups: Sequence[Mapping[str, Any]]) -> Site:
    """What this rank's update works on."""
    comm = handle.comm
    axes = {"dp": comm.control, "shard": comm.reduces["shard"]}
    first = comm.mesh.axis("replicate").rank == 0
    return Site(make_regions(handle, groups), handle.device, comm.control, axes, first)


def make_regions(handle: Handle, groups: Sequence[Mapping[str, Any]]) -> list[Region]:
    """The regions that this rank updates, with the optimizer group of each parameter."""
    group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
    regions: list[Region] = []
    first_flag, host = 0, handle.runtime.storage.host
    for unit in handle.runtime.units:
        for group in unit.trainable:
            regions.append(
                Region(
                    label=f"{unit.label} ({group.plan.param.dtype})",
                    layout=group.plan.layout,
                    start=group.update_range[0],
                    master=group.update_master,
                    param=group.step_param,
                    grad=partial(_step_grad, group),
                    first_flag=first_flag,
                    hyper=[group_of.get(id(parameter), -1) for parameter in group.parameters],
                    axis=unit.plan.axis,
                    divided=group.plan.update_axis is not None and group.plan.layout.shards > 1,
                    blocks=None if group.plan.moments is None else group.plan.moments.blocks,
                    owners=group.plan.owners,
                    whole_grad=partial(_whole_grad, group) if _has_whole_grad(group) else None,
                    memory=host.zeros if host is not None and group.plan.state_on_host else None,
                    on_host=_on_host(group),
                )
            )
            first_flag += len(group.parameters)
    return regions


def _step_grad(group: Group) -> torch.Tensor:
    return group.step_grad


def _on_host(group: Group) -> frozenset[str]:
    """What of an update's operands rests in host memory: 'master', 'param', 'grad'."""
    plan, found = group.plan, set[str]()
    if plan.master is None:  # the parameters are their own master weights
        found |= {"master"} if plan.param_on_host else set()
    else:
        found |= {"master"} if plan.master.tier is Tier.HOST else set()
        found |= {"param"} if plan.param_on_host else set()
    return frozenset(found | ({"grad"} if plan.grad_on_host else set()))


def _has_whole_grad(group: Group) -> bool:
    return group.plan.grad is not None and group.plan.grad.axis is None


def _whole_grad(group: Group) -> torch.Tensor:
    assert group.grad is not None
    return group.grad


def stepper_of(model: nn.Module) -> StepperBase:
    """The stepper of a model that was sharded with an optimizer."""
    found = model.__dict__.get(_STEPPER) if isinstance(model, nn.Module) else None
    if found is None:
        handle_of(model)
        raise UsageError("the model was sharded without an optimizer: nothing can be stepped; pass one to shard()")
    assert isinstance(found, StepperBase)
    return found


def find_stepper(model: nn.Module) -> StepperBase | None:
    """The model's stepper, None where it was sharded without an optimizer."""
    return stepper_of(model) if _STEPPER in model.__dict__ else None


def find_optimizer(model: nn.Module) -> ShardedOptimizer | None:
    """The model's optimizer, None where it was sharded without one."""
    found: ShardedOptimizer | None = model.__dict__.get(_OPTIMIZER)
    return found


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside only accumulate on this rank; the next backward outside, or the step, reduces."""
    with handle_of(model).runtime.no_sync():
        yield


def clip_grad_norm_(model: nn.Module, max_norm: float) -> float:
    """Clip the coming step to `max_norm`; returns the global gradient norm. Called by all ranks, after the backward."""
    if not max_norm > 0:
        raise UsageError(f"clip_grad_norm_: max_norm {max_norm} must be above 0; float('inf') only measures")
    stepper = stepper_of(model)
    norm = stepper.norm()
    stepper.clip_next(max_norm)
    return norm


def get_global_grad_norm(model: nn.Module) -> float | None:
    """Global norm of the averaged, unscaled gradients of the last step, before clipping; None before the first."""
    return stepper_of(model).report.norm


def drain(model: nn.Module) -> None:
    """Finish all work in flight; afterwards parameters that rest whole may be read outside of a forward."""
    handle_of(model).runtime.drain()


def plan_of(model: nn.Module) -> Plan:
    """The plan that the model runs."""
    return handle_of(model).plan


def peer_memory_nbytes(model: nn.Module) -> int:
    """Device bytes on this rank that ranks share and `torch.cuda.memory_allocated` does not count; 0 without copies."""
    peers = handle_of(model).runtime.peers
    return 0 if peers is None else peers.nbytes


def close(model: nn.Module) -> None:
    """Take zeroshard's hooks off the model and stop its watchdog; parameters stay sharded, and can be sharded anew."""
    handle = find_handle(model)
    if handle is not None:
        close_handle(handle)
        model.__dict__.pop(_STEPPER, None)
        model.__dict__.pop(_OPTIMIZER, None)
