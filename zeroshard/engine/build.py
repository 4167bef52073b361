"""Builds the running engine of a model from its plan: communicators, storage, streams, runtime and hooks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.mesh import RankMesh, build_mesh, world_size
from zeroshard.comm.nested import NestedCollectives
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.peers import PeerMemoryFactory
from zeroshard.comm.stages import StagePlace, Stages, axes_of_all
from zeroshard.comm.waiting import Waiter
from zeroshard.comm.watchdog import Watchdog
from zeroshard.engine.core.handle import Comm, Handle, attach, find_handle
from zeroshard.engine.core.hooks import install_hooks
from zeroshard.engine.core.runtime import Runtime
from zeroshard.engine.core.streams import CudaStreams, QueuedStreams, Streams
from zeroshard.engine.core.tied import TiedCopies, TiedUnit, find_tied, share_values
from zeroshard.engine.memory.peer_memory import PeerAllocator, open_peers
from zeroshard.engine.memory.rank_values import write_parameter
from zeroshard.engine.memory.storage import Storage
from zeroshard.engine.memory.tiers import TierFactory, check_tiers, open_tiers
from zeroshard.engine.outside_step.closed_state import unguard_closed_state
from zeroshard.engine.outside_step.gathered import place_of
from zeroshard.errors import PlanError, SpillError, UsageError, ZeroShardWarning
from zeroshard.fp8.convert import convert, restore
from zeroshard.mesh import MODEL_AXES, NESTED, TENSOR, Axes
from zeroshard.plan.agreement import agreed_text
from zeroshard.plan.legs import replica_axes
from zeroshard.plan.placement import Tier
from zeroshard.plan.plan import Plan
from zeroshard.sharding.deferred.init import fill_in_place, is_deferred, materialize
from zeroshard.sharding.dtensors import holder_of
from zeroshard.sharding.int4_layers import keep_int4_codes
from zeroshard.sharding.int8_layers import read_int8_codes
from zeroshard.sharding.resting import unguarded
from zeroshard.sharding.unowned import whole_shape
from zeroshard.sharding.unowned_guard import guard_unowned
from zeroshard.sharding.unpack import repack, unpack


def build_handle(
    model: nn.Module,
    plan: Plan,
    *,
    device: torch.device | None = None,
    sync_parameters: bool = True,
    streams: Streams | None = None,
    peer_memory: PeerMemoryFactory | None = None,
    tiers: Mapping[Tier, TierFactory] | None = None,
    place: StagePlace | None = None,
    tied: Sequence[str] = (),
) -> Handle:
    """Shard `model` by `plan` and hook it; called by all ranks.

    Args:
        device: where state lives; by default this rank's GPU, else the CPU.
        sync_parameters: start from rank 0's parameters and buffers everywhere.
        streams: the streams to run on instead of the device's own (for example the checking backend).
        peer_memory: allocates the memory that peers copy from and to, instead of the GPUs' symmetric memory.
        tiers: factories for the memory of tiers other than device and host.
        place: this rank's place among pipeline stages if `model` is a stage; the plan is for the stage's ranks.
        tied: paths of modules of which other stages hold copies.

    Raises:
        PlanError: the plan is for other ranks or other parameters, or uses a tier without memory.
        UsageError: the model is sharded already.
    """
    if find_handle(model) is not None:
        raise UsageError(
            f"this {type(model).__name__} is sharded already; for another engine close it first (zeroshard.close), or "
            "build a new model"
        )
    _check_model(model)
    tiers = {} if tiers is None else tiers
    device = default_device() if device is None else device
    try:
        unpack(model, device)
        read_int8_codes(model, device)
        keep_int4_codes(model)
        return _build(model, plan, device, sync_parameters, streams, peer_memory, tiers, place, tied)
    except BaseException:
        repack(model)
        raise


def _build(
    model: nn.Module,
    plan: Plan,
    device: torch.device,
    sync_parameters: bool,
    streams: Streams | None,
    peer_memory: PeerMemoryFactory | None,
    tiers: Mapping[Tier, TierFactory],
    place: StagePlace | None,
    tied: Sequence[str],
) -> Handle:
    """`build_handle` of a model whose parameters are plain."""
    _check_plan(model, plan, place)
    check_tiers(plan, tiers)
    over = _axes_of(plan) if place is None else axes_of_all(_axes_of(plan), device)
    mesh = build_mesh(plan.mesh, over, None if place is None else place.whole)
    comm = _communicators(mesh)
    if place is not None:
        comm.stages = Stages(place, device, comm.sent)
    try:
        found = [] if comm.stages is None else find_tied(plan, tied, comm.stages)
        return _start_engine(model, plan, comm, device, sync_parameters, streams, peer_memory, tiers, found)
    except BaseException as error:
        restore(model)
        _leave_communicators(comm, device, idle=isinstance(error, (PlanError, UsageError)))
        raise


def _start_engine(
    model: nn.Module,
    plan: Plan,
    comm: Comm,
    device: torch.device,
    sync_parameters: bool,
    streams: Streams | None,
    peer_memory: PeerMemoryFactory | None,
    tiers: Mapping[Tier, TierFactory],
    tied: Sequence[TiedUnit],
) -> Handle:
    """The part of `build_handle` after the communicators were made."""
    comm.log.record_plan(agreed_text(plan))
    parameters = dict(model.named_parameters())
    _warn_of_gradients(parameters)
    _move_buffers(model, device)
    if plan.policy.products is not None:
        convert(model, plan.policy.products)
    share_values(model, tied, device)
    if sync_parameters and not is_deferred(model):
        _broadcast(model, plan, comm, device)
    _share_random_state(comm, device)
    peers = open_peers(plan, comm.mesh, device, comm.sent, comm.watchdog, peer_memory)
    allocator = None if peers is None else PeerAllocator(peers, plan)
    memory = open_tiers(plan, device, tiers, comm.control)
    try:
        storage = Storage(plan, parameters, comm.mesh.rank, device, memory, allocator)
        if is_deferred(model):
            _materialize(model, plan, storage, device)
    except SpillError as error:  # the first values could not be written
        comm.watchdog.announce(error)
        raise
    guard_unowned(model)
    unguard_closed_state(model)
    if streams is None:
        streams = CudaStreams(device) if device.type == "cuda" else QueuedStreams(Waiter(comm.watchdog))
    report_failure = comm.watchdog.announce
    runtime = Runtime(model, plan, storage, streams, comm.gathers, comm.reduces, comm.log, peers, report_failure)
    runtime.scale_weights(comm.control)
    if comm.stages is not None and tied:
        runtime.tied = TiedCopies(runtime.units, tied, runtime.gradients, comm.stages.place.index)
    handle = Handle(runtime, comm, device, install_hooks(model, runtime))
    attach(model, handle)
    return handle


def _leave_communicators(comm: Comm, device: torch.device, *, idle: bool) -> None:
    """Close the communicators after a failed start, so that the other ranks learn that this rank has left.

    Args:
        idle: no communicator failed; a failed one must not be destroyed.
    """
    if idle and device.type == "cuda":
        torch.cuda.synchronize(device)
    comm.close(idle=idle)


def default_device() -> torch.device:
    """This rank's GPU (LOCAL_RANK, as torchrun sets it), or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Some launchers make only one GPU visible to each rank; then it is number 0, whatever LOCAL_RANK is.
    seen = torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())) if seen > 1 else 0
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def _warn_of_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Gradients of backwards before the model was sharded are dropped, where torch would add later ones to them."""
    with unguarded():
        for name, parameter in parameters.items():
            if parameter.grad is not None and not parameter.grad.is_meta and bool(parameter.grad.any()):
                warnings.warn(
                    f"parameter {name!r} has a gradient of a backward before the model was sharded, which is dropped; "
                    "call zero_grad() before if that is what is meant, or make the backward afterwards",
                    ZeroShardWarning,
                    stacklevel=2,
                )
                return


def _check_model(model: nn.Module) -> None:
    if torch.is_inference_mode_enabled():
        raise UsageError("shard() inside torch.inference_mode(): what is made there can't be trained; leave it first")
    for path, module in model.named_modules():
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise UsageError(f"{path or 'the model'} is a {type(module).__name__}; pass the module that it wraps")
    for name, parameter in model.named_parameters():
        place = place_of(parameter)
        if place is None:
            continue
        handle, _, group, index = place
        empty = parameter.numel() != group.plan.layout.segments[index].numel
        if empty or find_handle(handle.runtime.model) is handle:
            raise UsageError(
                f"parameter {name!r} belongs to a {type(handle.runtime.model).__name__} that was sharded before"
                f"{', and is empty' if empty else ''}; build a new model, or shard the one that holds both parts"
            )


def _check_plan(model: nn.Module, plan: Plan, place: StagePlace | None) -> None:
    """Check the plan before any communicator is made, since a mesh for other ranks would fail less clearly there."""
    world = world_size() if place is None else place.own.world_size
    if plan.mesh.world_size != world:
        running = "1 is" if world == 1 else f"{world} are"
        raise PlanError(
            f"the plan is for {plan.mesh.world_size} ranks ({plan.mesh}), but {running} running; make it with "
            f"build_plan(units, recipe, {world})"
        )
    paths = dict(model.named_modules())
    for unit in plan.units:
        if unit.groups and unit.name not in paths:
            raise PlanError(
                f"the plan has a unit {unit.name!r}, but the model has no module of this path; make the plan from this "
                "model"
            )
    shapes = {name: whole_shape(parameter) for name, parameter in model.named_parameters()}
    planned = {segment.name: segment.shape for _, group in plan.groups() for segment in group.layout.segments}
    for name in [*shapes, *planned]:
        if shapes.get(name) != planned.get(name):
            raise PlanError(
                f"parameter {name!r} is {shapes.get(name, 'absent')} in the model and {planned.get(name, 'absent')} in "
                "the plan; make the plan from this model"
            )


def _axes_of(plan: Plan) -> list[Axes]:
    """The sets of axes that need communicators: those of units, of their replicas, and single axes of the mesh."""
    found: list[Axes] = []
    for unit, group in plan.groups():
        axes = unit.axes_of(group)
        found += [axes, replica_axes(unit, group), plan.mesh.without(axes)]
        if group.model_axes:
            data = plan.mesh.without(group.model_axes)
            found += [group.model_axes, data, plan.mesh.without((*axes, *group.model_axes))]
        if group.second is not None:
            found += [group.second.axes, unit.axes[len(group.second.axes) :]]
    found += [(axis,) for axis in plan.mesh.among(MODEL_AXES) if plan.mesh.size((axis,)) > 1]
    return [axes for axes in dict.fromkeys(found) if axes]


def _communicators(mesh: RankMesh) -> Comm:
    log, counted = OperationLog(), OperationLog()
    watchdog = Watchdog(mesh.store(), mesh.rank, mesh.world_size, log)

    def named(axes: Axes, purpose: str) -> str:
        return f"{'+'.join(axes)}/{purpose}"

    gathers = {
        axes: Collectives(groups.gather, named(axes, "gather"), counted, watchdog)
        for axes, groups in mesh.groups.items()
    }
    reduces = {
        axes: Collectives(groups.reduce, named(axes, "reduce"), counted, watchdog)
        for axes, groups in mesh.groups.items()
    }
    if NESTED in mesh.groups:
        group, inner, outer = mesh.over(NESTED), NESTED[:1], NESTED[1:]
        for found, purpose, whole in ((gathers, "gather", group.gather), (reduces, "reduce", group.reduce)):
            name = named(NESTED, purpose)
            found[NESTED] = NestedCollectives(whole, name, counted, watchdog, found[inner], found[outer])
    all_axes = mesh.mesh.names
    control = Collectives(mesh.over(all_axes).control, named(all_axes, "control"), counted, watchdog, log)
    return Comm(mesh, log, counted, watchdog, control, gathers, reduces)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _broadcast(model: nn.Module, plan: Plan, comm: Comm, device: torch.device) -> None:
    """Broadcast rank 0's parameters and buffers, one tensor at a time; as bytes, since gloo lacks some dtypes."""
    if comm.control.size == 1:
        return
    divided = {
        segment.name: group.model_axes
        for _, group in plan.groups()
        for segment in group.layout.segments
        if segment.cut is not None
    }
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.numel() == 0 or tensor.is_meta:
            continue
        tensor, over = holder_of(tensor), comm.control
        if name in divided:  # no rank has the whole parameter, so each part is broadcast by its first rank
            over = comm.gathers[comm.mesh.mesh.without(divided[name])]
        value = tensor.detach().to(device).contiguous()
        over.wait(over.broadcast(value.view(-1).view(torch.uint8), 0, name))
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            tensor.data = value.to(tensor.device)  # expanded: several elements share memory and can't be written
        elif tensor.data_ptr() != value.data_ptr():
            tensor.data.copy_(value)


def _share_random_state(comm: Comm, device: torch.device) -> None:
    """Give ranks of an axis that read the same data the random state of the first one, so that dropout is equal."""
    for axis in comm.mesh.mesh.among((TENSOR,)):
        over = comm.gathers.get((axis,))
        if over is None or over.size == 1:
            continue
        on_host = torch.get_rng_state().to(device)
        over.wait(over.broadcast(on_host, 0, "(random state)"))
        torch.set_rng_state(on_host.cpu())
        if device.type == "cuda":
            own = torch.cuda.get_rng_state(device).to(device)
            over.wait(over.broadcast(own, 0, "(random state)"))
            torch.cuda.set_rng_state(own.cpu(), device)


def _materialize(model: nn.Module, plan: Plan, storage: Storage, device: torch.device) -> None:
    """Write a deferred model's initial values into the shards, one tensor at a time."""
    places = {
        segment.name: (group, index)
        for unit in storage.units
        for group in unit.groups
        for index, segment in enumerate(group.plan.layout.segments)
    }

    def sink(name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if name in places:
            group, index = places[name]
            write_parameter(group, index, value)
            value = group.empties[index]
        fill_in_place(name, tensor, value)

    materialize(model, device, sink)
    storage.place_slots(plan)
