"""The native interface: `shard` takes a model and a torch optimizer, and training is a plain PyTorch loop.

model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan=3)
for batch in loader:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Literal, TypedDict, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from zeroshard.arguments import need_kind
from zeroshard.comm.device_mesh import mesh_from
from zeroshard.comm.peers import PeerMemoryFactory
from zeroshard.comm.stages import StagePlace, find_stage
from zeroshard.comm.together import gather_from_all
from zeroshard.engine.automatic import OFFLOADS, AutoPlan, assumed_example, choose, example_of, reachable
from zeroshard.engine.build import build_handle, default_device
from zeroshard.engine.closing import close_handle
from zeroshard.engine.core.handle import find_handle, handle_of
from zeroshard.engine.core.streams import Streams
from zeroshard.engine.memory.tiers import TierFactory
from zeroshard.engine.outside_step.gathered import mark_parameters
from zeroshard.engine.planning import check_update, make_plan, stage_recipe
from zeroshard.engine.step.attached import attach_optimizer, detach_optimizer, stepper_of
from zeroshard.engine.step.make_stepper import make_stepper
from zeroshard.errors import PlanError, RanksChanged, UsageError
from zeroshard.experts.divide import divide_experts
from zeroshard.mesh import MODEL_AXES, Mesh
from zeroshard.optim.clients import client_source
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.sources import Source, check_parameters
from zeroshard.plan.builder import Recipe, with_peer_copies
from zeroshard.plan.check import peer_problem
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import STAGES, Tier
from zeroshard.plan.plan import Plan
from zeroshard.planner.predict.tiers import Offload as PlannedOffload
from zeroshard.sharding.deferred.calls import suspended
from zeroshard.sharding.dtensors import axes_of_model, mesh_with_model, refuse_unused
from zeroshard.sharding.marks import set_z3_leaf_module
from zeroshard.sharding.replaced import replace_in_optimizer
from zeroshard.sharding.shared_memory import refuse_shared_memory
from zeroshard.sharding.units import find_units, refuse_uninitialized
from zeroshard.sharding.unpack import members_of

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer]
OptimizerSource = OptimizerLike | None

_PLANS = "a stage from 0 to 3, a Recipe, a Plan, an AutoPlan, or 'auto' is needed"


class ShardOptions(TypedDict, total=False):
    """The keyword arguments of `shard`, for its overloads."""

    plan: Plan | Recipe | AutoPlan | int | Literal["auto"]
    units: Sequence[str] | None
    mesh: DeviceMesh | Mesh | None
    tied: Sequence[str]
    shard_size: int | None
    accumulate: bool | None
    micro_batches: int | None
    clip_norm: float | None
    scaler: LossScaler | None
    allow_untested: bool
    device: torch.device | None
    sync_parameters: bool
    streams: Streams | None
    peer_memory: PeerMemoryFactory | None
    tiers: Mapping[Tier, TierFactory] | None


@overload
def shard(
    model: nn.Module, optimizer: OptimizerLike, **options: Unpack[ShardOptions]
) -> tuple[nn.Module, ShardedOptimizer]: ...


@overload
def shard(model: nn.Module, optimizer: None = None, **options: Unpack[ShardOptions]) -> tuple[nn.Module, None]: ...


@suspended()
def shard(
    model: nn.Module,
    optimizer: OptimizerSource = None,
    *,
    plan: Plan | Recipe | AutoPlan | int | Literal["auto"] = 3,
    units: Sequence[str] | None = None,
    mesh: DeviceMesh | Mesh | None = None,
    tied: Sequence[str] = (),
    shard_size: int | None = None,
    accumulate: bool | None = None,
    micro_batches: int | None = None,
    clip_norm: float | None = None,
    scaler: LossScaler | None = None,
    allow_untested: bool = False,
    device: torch.device | None = None,
    sync_parameters: bool = True,
    streams: Streams | None = None,
    peer_memory: PeerMemoryFactory | None = None,
    tiers: Mapping[Tier, TierFactory] | None = None,
) -> tuple[nn.Module, ShardedOptimizer | None]:
    """Shard `model` and its optimizer; called by all ranks. The model is changed in place and returned.

    Args:
        optimizer: a torch optimizer over the model's parameters that has not stepped yet, or a callable that makes one.
        plan: a ZeRO stage (0 to 3), a Recipe, a finished Plan, or "auto" or an AutoPlan: the planner chooses.
        units: paths of the modules that are gathered as a whole, instead of the default ones.
        mesh: the ranks as named axes, for example a torch DeviceMesh: with `dp_replicate` and `dp_shard` a stage
            divides the state over `dp_shard`, and each subgroup holds a copy. By default all ranks are one subgroup.
            An axis `tp` of the model (parallelize_module, tp_plan="auto") lies inside of the subgroups. Over an axis
            `ep` the experts of the model are divided. With `pp` of several ranks `model` is this rank's pipeline stage,
            its parameters named as in the whole model.
        tied: paths of modules of which several pipeline stages hold copies.
        shard_size: ranks per subgroup, instead of a mesh.
        accumulate: whether several backwards happen per step; the plan then has accumulators.
        micro_batches: how many micro-batches pass a block before the next one, by a `VerticalSchedule`.
        clip_norm: global gradient norm above which gradients are scaled down.
        scaler: loss scale for float16.
        allow_untested: accept an optimizer that is not known to be element-wise.
        device, sync_parameters, streams, peer_memory, tiers: see `build_handle`.

    Raises:
        PlanError, UsageError: the arguments do not fit together; the message says how to correct them.
    """
    _check_arguments(mesh, device, scaler, tiers)
    refuse_uninitialized(model)
    refuse_shared_memory(model)
    device = default_device() if device is None else device
    replace_in_optimizer(optimizer, divide_experts(model, mesh, device.type))
    source = None
    if optimizer is not None:
        source = client_source(optimizer, model.parameters(), allow_untested=allow_untested)
    ranks, place = _mesh(model, mesh, shard_size, device)
    if place is None and tied:
        raise PlanError("shard(tied=...): modules are tied between pipeline stages; give a mesh with an axis 'pp'")
    if isinstance(plan, (AutoPlan, str)):
        if isinstance(plan, str) and plan != "auto":
            raise PlanError(f"plan={plan!r}: {_PLANS}")
        if place is not None:
            raise PlanError(f"plan={plan!r} is not supported with pipeline stages; give a ZeRO stage or a recipe")
        auto = AutoPlan() if isinstance(plan, str) else plan
        plan = _chosen(model, auto, source, device, units, ranks, accumulate=accumulate, clip_norm=clip_norm)
    for path in tied:
        set_z3_leaf_module(model.get_submodule(path), True)  # a unit of its own, with the same layout on each stage
    if place is not None:
        plan = stage_recipe(plan, ranks)
    asked = {"accumulate": accumulate, "micro_batches": micro_batches, "clip_norm": clip_norm}
    made = make_plan(model, plan, source, device, units, ranks, **asked)
    return build_optimized(
        model,
        made,
        source,
        scaler=scaler,
        device=device,
        sync_parameters=sync_parameters,
        streams=streams,
        peer_memory=peer_memory,
        tiers=tiers,
        place=place,
        tied=tied,
    )


def _check_arguments(mesh: object, device: object, scaler: object, tiers: object) -> None:
    """Raises UsageError for arguments of another kind, each of which may be None."""
    nothing = type(None)
    need_kind(mesh, (DeviceMesh, Mesh, nothing), "shard(mesh=)", "a torch DeviceMesh or a zeroshard.Mesh")
    need_kind(device, (torch.device, nothing), "shard(device=)", "a torch.device")
    if isinstance(device, torch.device) and device.type == "meta":
        raise UsageError(
            "shard(device=): nothing can be trained on the meta device; give the GPU of this rank or 'cpu'"
        )
    need_kind(scaler, (LossScaler, nothing), "shard(scaler=)", "a LossScaler")
    need_kind(tiers, (Mapping, nothing), "shard(tiers=)", "a mapping from Tier to the function that opens its memory")


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
    tiers: Mapping[Tier, TierFactory] | None = None,
    place: StagePlace | None = None,
    tied: Sequence[str] = (),
) -> tuple[nn.Module, ShardedOptimizer | None]:
    """Shard `model` by a finished plan and put the optimizer of `source` over it; called by all ranks."""
    if source is not None:
        check_parameters(source, model)
    handle = build_handle(
        model,
        plan,
        device=device,
        sync_parameters=sync_parameters,
        streams=streams,
        peer_memory=peer_memory,
        tiers=tiers,
        place=place,
        tied=tied,
    )
    mark_parameters(handle)
    if source is None:
        return model, None
    for group in source.groups:  # frozen tensors made of others may be among them
        group["params"] = [member for each in group["params"] for member in members_of(each)]
    try:
        stepper = make_stepper(handle, source, scaler)
    except BaseException:
        close_handle(handle)  # else no later call could shard the model
        raise
    return model, attach_optimizer(model, source, stepper)


def _mesh(
    model: nn.Module, mesh: DeviceMesh | Mesh | None, shard_size: int | None, device: torch.device
) -> tuple[Mesh, StagePlace | None]:
    """The mesh of the ranks that run the model, and their place among pipeline stages."""
    if mesh is not None and shard_size is not None:
        raise PlanError("shard: give a mesh or shard_size, not both")
    mesh = mesh_from(mesh) if isinstance(mesh, DeviceMesh) else mesh
    place = None if mesh is None else find_stage(mesh)
    found = mesh_with_model(model, mesh, shard_size)
    if place is None:
        return found, None
    refuse_unused(place.own, _used_by_any(axes_of_model(model), device))
    return place.own, place


def _used_by_any(own: Set[str], device: torch.device) -> list[str]:
    """The axes over which any stage divides its parameters; called by all ranks."""
    flags = torch.tensor([axis in own for axis in MODEL_AXES], dtype=torch.uint8, device=device)
    told = gather_from_all(flags, "shard() of pipeline stages", "all ranks call it")
    return [axis for axis, used in zip(MODEL_AXES, torch.stack(told).amax(dim=0).tolist(), strict=True) if used]


def _chosen(
    model: nn.Module,
    auto: AutoPlan,
    source: Source | None,
    device: torch.device,
    units: Sequence[str] | None,
    mesh: Mesh,
    *,
    accumulate: bool | None,
    clip_norm: float | None,
) -> Recipe:
    """The recipe that the planner chooses."""

    def recipe(stage: int, offload: PlannedOffload, share: float) -> Recipe:
        host = Offload(share, offload is PlannedOffload.CPU_PARAM) if offload is not PlannedOffload.NONE else None
        return dataclasses.replace(auto.recipe, sharding=STAGES[stage].on(mesh), offload=host)

    def make(stage: int, offload: PlannedOffload, more: bool, share: float) -> Plan:
        chosen = dataclasses.replace(recipe(stage, offload, share), peer_copies=False)
        adds = True if more else accumulate
        plan = make_plan(model, chosen, source, device, units, mesh, accumulate=adds, clip_norm=clip_norm)
        check_update(plan, source)
        return with_peer_copies(plan) if peers and peer_problem(plan) is None else plan

    peers = reachable(device) and auto.recipe.peer_copies is not False
    example = example_of(auto.example) or assumed_example(model, 1, None)
    offloads = OFFLOADS if auto.offload else (PlannedOffload.NONE,)
    found = choose(model, find_units(model, units), make, example, device, limit=auto.device_memory, offloads=offloads)
    return recipe(found.stage, found.offload, found.share)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside only accumulate on this rank; the next backward outside, or the step, reduces."""
    runtime = handle_of(model).runtime
    if not runtime.plan.policy.accumulate:
        instead = " in place of micro_batches" if runtime.plan.policy.micro_batches > 1 else ""
        raise UsageError(f"no_sync needs a plan that accumulates: shard(..., accumulate=True){instead}")
    with runtime.reduce_policy.no_sync():
        yield


def clip_grad_norm_(model: nn.Module, max_norm: float) -> float:
    """Clip the coming step to `max_norm`, in place of the plan's clip_norm; returns the global gradient norm.

    Called by all ranks, after the backward. An infinite `max_norm` only measures: what clips the step stays.
    """
    if not max_norm > 0:
        raise UsageError(f"clip_grad_norm_: max_norm {max_norm} must be above 0; float('inf') only measures")
    stepper = stepper_of(model)
    norm = stepper.norm()
    if max_norm < math.inf:
        stepper.clip_next(max_norm)
    return norm


def get_global_grad_norm(model: nn.Module) -> float | None:
    """Global norm of the averaged, unscaled gradients of the last step, before clipping; None before the first."""
    return stepper_of(model).report.norm


def drain(model: nn.Module) -> None:
    """Finish all running operations; afterwards parameters that rest whole may be read outside of a forward."""
    handle_of(model).runtime.drain()


def plan_of(model: nn.Module) -> Plan:
    """The plan that the model runs."""
    return handle_of(model).plan


def peer_memory_nbytes(model: nn.Module) -> int:
    """Bytes of peer memory on this rank, which `torch.cuda.memory_allocated` does not count; 0 without copies."""
    peers = handle_of(model).runtime.peers
    return 0 if peers is None else peers.nbytes


def close(model: nn.Module) -> None:
    """Remove zeroshard's hooks from the model and stop its watchdog; it stays sharded, and can be sharded again."""
    handle = find_handle(model)
    if handle is not None:
        close_handle(handle)
        detach_optimizer(model)


def abandon(model: nn.Module) -> None:
    """Close a model without its other ranks, which are lost; its parameters are not usable afterwards."""
    handle = find_handle(model)
    if handle is not None:
        handle.abandon(RanksChanged("the ranks of this model have changed"))
        detach_optimizer(model)
