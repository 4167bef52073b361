"""Whole parameters outside of a forward: GatheredParameters, and iteration over all parameters.

Groups are gathered one by one into separate memory, never into the slots, so that no running forward is disturbed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from enum import Enum
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.arguments import need_kind
from zeroshard.engine.core.handle import Handle, handle_of
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.rank_values import is_divided, rank_param, rank_shard, read_values, write_changed
from zeroshard.engine.memory.unit import Unit
from zeroshard.engine.outside_step.block_reads import BlockReads
from zeroshard.engine.outside_step.disk_errors import report_disk_errors
from zeroshard.errors import SpillError, UsageError, ZeroShardWarning
from zeroshard.sharding.deferred.calls import suspended
from zeroshard.sharding.dtensors import holder_of
from zeroshard.sharding.fingerprint import Fingerprints
from zeroshard.sharding.layout import Segment
from zeroshard.sharding.marks import PARAMETER_OF
from zeroshard.sharding.resting import is_resting, recorded_name, show_values
from zeroshard.sharding.unowned import UnownedShard, rest_unowned, unowned_shard_of, whole_shape
from zeroshard.sharding.unowned_values import gather_unowned
from zeroshard.sharding.unpack import parameters_of

_IN_BLOCK = "_zeroshard_gathered"
"""Attribute of a parameter while a GatheredParameters block holds it."""


def mark_parameters(handle: Handle) -> None:
    """Let each parameter know its handle, so that GatheredParameters works from parameters alone."""
    for unit in handle.runtime.units:
        for group in unit.groups:
            for index, parameter in enumerate(group.parameters):
                setattr(parameter, PARAMETER_OF, (handle, unit, group, index))


def unmark_parameters(handle: Handle) -> None:
    """Let the parameters forget their handle."""
    for unit in handle.runtime.units:
        for group in unit.groups:
            for parameter in group.parameters:
                vars(parameter).pop(PARAMETER_OF, None)


Place = tuple[Handle, Unit, Group, int]


def place_of(parameter: torch.Tensor) -> Place | None:
    """A parameter's handle, unit, group and index; None for tensors that no sharded model owns."""
    found: Place | None = parameter.__dict__.get(PARAMETER_OF)
    return found


class ChangePolicy(Enum):
    """What happens to values that were changed without a modifier_rank."""

    REFUSE = "an error"
    RESTORE = "the old values again, with a warning"


class GatheredParameters:
    """Inside the with-block the given parameters are whole; called by all ranks.

    If blocks are nested, the outermost one handles a parameter; inner ones ignore it and send nothing for it, so a
    single rank may open them. A forward inside uses the values of the block, with changes, and gathers only units of
    which the block does not hold all parameters.

    Args:
        params: a parameter, any iterable of them, a module, or None. Tensors that are not sharded are left alone.
        modifier_rank: the rank whose changes to the values are kept on all ranks; None: changes are refused.
        fwd_module: accepted for DeepSpeed's signature; forward gathers units by itself.
        enabled: False does nothing.

    Raises:
        UsageError: values were changed though modifier_rank is None; the rank does not exist.
    """

    without_modifier = ChangePolicy.REFUSE

    def __init__(
        self,
        params: nn.Module | torch.Tensor | Iterable[torch.Tensor | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._members = list({id(member): member for member in (_tensors(params) if enabled else [])}.values())
        self._modifier = modifier_rank
        self._held: list[torch.Tensor] = []
        self._places: list[tuple[torch.Tensor, Place]] = []
        self._unowned: list[tuple[torch.Tensor, UnownedShard]] = []
        self._gathered: list[tuple[Unit, Group, int]] = []
        self._versions: dict[int, int] = {}
        self._fingerprints: list[tuple[list[torch.Tensor], Fingerprints, torch.Tensor]] = []
        self._before: list[torch.Tensor | None] = []
        self._reads = BlockReads()
        self._open = 0  # how often it was entered and not left: only the outermost time does anything

    @suspended()
    def __enter__(self) -> GatheredParameters:
        if self._open:
            self._open += 1
            return self
        free = [member for member in self._members if _IN_BLOCK not in vars(member)]
        self._places = [(member, place) for member in free if (place := place_of(member)) is not None]
        self._unowned = [(member, unowned) for member in free if (unowned := unowned_shard_of(member)) is not None]
        handles = {id(place[0]): place[0] for _, place in self._places}
        sizes = {handle.comm.control.size for handle in handles.values()} | {one.ranks for _, one in self._unowned}
        for ranks in sizes:
            if self._modifier is not None and not 0 <= self._modifier < ranks:
                raise UsageError(f"GatheredParameters: modifier_rank {self._modifier} is not one of the {ranks} ranks")
        for handle in handles.values():
            handle.runtime.drain()
        try:
            self._gather()
        except SpillError:
            self._end_gather()
            raise
        for parameter, unowned in self._unowned:
            show_values(parameter, gather_unowned(unowned, parameter.device).to(parameter.dtype))
        self._held = [member for member, _ in (*self._places, *self._unowned)]
        for member in self._held:
            vars(member)[_IN_BLOCK] = True
        self._versions = {id(member): holder_of(member)._version for member in self._held}
        self._take_fingerprints()
        self._before = [self._copy_before(*place) for place in self._places]
        gathered = (group.parameters[index] for _, group, index in self._gathered)
        self._reads.begin((*gathered, *(parameter for parameter, _ in self._unowned)))
        self._open = 1
        return self

    def _gather(self) -> None:
        wholes: dict[int, torch.Tensor] = {}
        for parameter, (handle, unit, group, index) in self._places:
            segment = group.plan.layout.segments[index]
            if not group.plan.param.divided and not group.plan.scaled:
                continue  # whole already
            if not is_resting(parameter) and self._modifier is None and not group.plan.scaled:
                # The values are here, so no collective is needed; a copy, because a pass in the block may release them.
                show_values(parameter, holder_of(parameter).detach().clone())
            else:
                if id(group) not in wholes:
                    wholes[id(group)] = _whole_of(handle, unit, group)
                show_values(parameter, wholes[id(group)][segment.offset : segment.end].view(segment.shape))
            self._gathered.append((unit, group, index))
            group.opened.add(index)

    def _take_fingerprints(self) -> None:
        """If changes are not kept: take fingerprints, since writes to `parameter.data` change no version counter."""
        for device in {member.device for member in self._held} if self._modifier is None else ():
            members = [member for member in self._held if member.device == device]
            fingerprints = Fingerprints(device)
            self._fingerprints.append((members, fingerprints, fingerprints.of(map(holder_of, members))))

    def _changed(self) -> list[torch.Tensor]:
        """The parameters that were changed, in the order in which they were given."""
        changed = {id(member) for member in self._held if holder_of(member)._version != self._versions[id(member)]}
        for members, fingerprints, before in self._fingerprints:
            different = (fingerprints.of(map(holder_of, members)) != before).tolist()
            changed.update(id(member) for member, differs in zip(members, different, strict=True) if differs)
        return [member for member in self._held if id(member) in changed]

    def _copy_before(self, parameter: torch.Tensor, place: Place) -> torch.Tensor | None:
        """A copy of a parameter that this block has not gathered: a change would overwrite its old values."""
        _, _, group, index = place
        if index in group.opened or self._keeps_anyway(parameter):
            return None
        kept = self._modifier is None or group.master is not None
        return holder_of(parameter).detach().clone() if kept else None

    @property
    def _drops(self) -> bool:
        return self._modifier is None and self.without_modifier is ChangePolicy.RESTORE

    @suspended()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open -= 1
        if self._open:
            return
        self._reads.end()
        swapped = [place for member, place in self._places if _IN_BLOCK not in vars(member)]
        resized = [] if swapped else self._take_all_home()
        changed = self._changed() if self._modifier is None else []
        try:
            if kind is None and swapped:
                raise UsageError(
                    f"parameter {_name_at(swapped[0])!r} was swapped for another tensor inside GatheredParameters "
                    "(torch.utils.swap_tensors), and is no longer a part of the sharded model; copy values into it: "
                    "parameter.data.copy_(value), with modifier_rank=0"
                )
            if kind is None and resized:
                raise UsageError(
                    f"{_describe(resized[0])} was given data of another shape inside GatheredParameters, which is not "
                    "kept; resize a parameter before shard() or initialize()"
                )
            if kind is None and self._modifier is not None:
                self._keep_changes(self._modifier)
            elif changed:
                self._restore(changed)
            if kind is None and self._drops:
                self._warn_of([member for member in changed if not self._keeps_anyway(member)])
            elif kind is None and changed:
                raise UsageError(
                    f"{_describe(changed[0])} was changed inside GatheredParameters without modifier_rank, so the "
                    "change would be lost; pass modifier_rank=0 (the rank whose values all ranks get)"
                )
        finally:
            self._end_gather()
            for parameter, _ in self._unowned:
                rest_unowned(parameter)
            for parameter, (handle, *_) in self._places:
                if not self._keeps_anyway(parameter):
                    handle.runtime.inspection.accept(parameter)
            for member in self._held:
                vars(member).pop(_IN_BLOCK, None)
            self._before.clear()
            self._fingerprints.clear()

    def _take_all_home(self) -> list[torch.Tensor]:
        """Where code gave whole parameters other data, write that to where the step and the plan have it.

        Returns the parameters whose data has another shape now.
        """
        resized = [one for one, _ in self._unowned if tuple(holder_of(one).shape) != whole_shape(one)]
        given: list[tuple[torch.Tensor, Group, int, torch.Tensor]] = []
        for member, (_, _, group, index) in self._places:
            value, home = holder_of(member).detach(), group.views[index]
            if value.shape != home.shape:
                resized.append(member)
            if index not in group.opened and (value.data_ptr(), value.stride()) != (home.data_ptr(), home.stride()):
                given.append((member, group, index, value))
        # Parameters may have been given the memory of each other, so all values are copied before the first is written.
        copies = [value.clone() for *_, value in given]
        for (member, group, index, _), value in zip(given, copies, strict=True):
            group.show_one(index)
            holder = holder_of(member)
            # As with torch, giving data is no change that a backward of an earlier loss would refuse.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(holder):
                if value.shape == holder.shape:
                    holder.copy_(value)
        return resized

    def _keeps_anyway(self, member: torch.Tensor) -> bool:
        """Whether a change stays, as outside of the block, though nobody asked to keep it."""
        return False

    def _warn_of(self, dropped: list[torch.Tensor]) -> None:
        if dropped:
            warnings.warn(
                f"{_describe(dropped[0])} was changed inside GatheredParameters without modifier_rank, and has its old "
                "values again, as with DeepSpeed at stage 3; pass modifier_rank=0 to keep that rank's change",
                ZeroShardWarning,
                stacklevel=4,
            )

    def _end_gather(self) -> None:
        """Return gathered parameters to their state outside of the block."""
        for unit, group, index in self._gathered:
            group.opened.discard(index)
            group.show_one(index) if unit.in_use or unit.gathered_beside else group.hide_one(index)
        self._gathered.clear()

    def _restore(self, changed: list[torch.Tensor]) -> None:
        members = {id(member) for member in changed}
        with torch.no_grad():
            for (parameter, (_, _, group, index)), before in zip(self._places, self._before, strict=True):
                if before is not None and id(parameter) in members:
                    group.show_one(index)  # it may have been given other data
                    holder_of(parameter).copy_(before)

    def _keep_changes(self, source: int) -> None:
        handles = {id(handle): handle for _, (handle, *_) in self._places}
        for handle in handles.values():
            handle.runtime.parameters.before_write()
        for (parameter, (handle, _, group, index)), before in zip(self._places, self._before, strict=True):
            value = holder_of(parameter).detach().contiguous()
            broadcast_part(handle, group, value, source, name_of(parameter))
            with report_disk_errors(handle):
                write_changed(group, index, value, before)
        for handle in handles.values():
            handle.runtime.parameters.mark_written(())
        for parameter, unowned in self._unowned:
            value = holder_of(parameter).detach().contiguous()
            if unowned.ranks > 1:
                dist.broadcast(value, source)
            unowned.write(value)


def broadcast_part(handle: Handle, group: Group, value: torch.Tensor, source: int, label: str) -> None:
    """Broadcast a parameter's `value` from rank `source`. If the model divides the parameter, each part is broadcast by
    the rank that has the same position on the data axes as `source`."""
    plan, comm = handle.plan, handle.comm
    if not group.plan.model_axes:
        comm.control.wait(comm.control.broadcast(value, source, label))
        return
    axes = plan.mesh.without(group.plan.model_axes)
    among = comm.gathers[axes]
    among.wait(among.broadcast(value, plan.mesh.position(source, axes), label))


def _tensors(params: nn.Module | torch.Tensor | Iterable[torch.Tensor | None] | None) -> list[torch.Tensor]:
    if params is None:
        return []
    if isinstance(params, torch.Tensor):
        return parameters_of(params)
    if isinstance(params, nn.Module):
        params = params.parameters()
    call, needed = "GatheredParameters", "a parameter, a module or an iterable of parameters"
    if isinstance(params, (str, bytes)) or not isinstance(params, Iterable):
        need_kind(params, (), call, needed)
    items = [item for item in params if item is not None]
    for item in items:
        need_kind(item, torch.Tensor, call, needed)
    return [parameter for item in items for parameter in parameters_of(item)]


def _describe(parameter: torch.Tensor) -> str:
    """The parameter, for a message."""
    name = recorded_name(parameter) if place_of(parameter) is None else name_of(parameter)
    return f"parameter {name!r}" if name else "a parameter"


def name_of(parameter: torch.Tensor) -> str:
    """The name of a sharded model's parameter in its plan."""
    place = place_of(parameter)
    assert place is not None
    return _name_at(place)


def _name_at(place: Place) -> str:
    return place[2].plan.layout.segments[place[3]].name


def _whole_of(handle: Handle, unit: Unit, group: Group) -> torch.Tensor:
    """The parameters of a group, flat, in memory of their own."""
    if group.plan.scaled and not is_divided(group):
        return rank_param(group)
    with report_disk_errors(handle):
        shard = rank_shard(group)
    return gather_whole(handle, unit, group, shard)


def gather_whole(handle: Handle, unit: Unit, group: Group, part: torch.Tensor) -> torch.Tensor:
    """All-gather this rank's `part` of a group (its shard in any dtype) into memory of its own."""
    part = part.to(handle.device)
    whole = torch.empty(group.plan.layout.numel, dtype=part.dtype, device=part.device)
    gathers = handle.comm.gathers[unit.plan.axes_of(group.plan)]
    handle.comm.log.record("all-gather", unit.label, whole.nbytes)
    gathers.wait(gathers.all_gather(whole, part, unit.label))
    return whole


def whole_value(handle: Handle, segment: Segment, flat: torch.Tensor) -> torch.Tensor:
    """A parameter in its shape, from its elements in a group; those that the model divides are gathered."""
    cut = segment.cut
    if cut is None:
        return flat.view(segment.shape)
    parts = torch.empty(cut.ranks * flat.numel(), dtype=flat.dtype, device=flat.device)
    gathers = handle.comm.gathers[(cut.axis,)]
    handle.comm.log.record("all-gather", segment.name, parts.nbytes)
    gathers.wait(gathers.all_gather(parts, flat.contiguous(), segment.name))
    return cut.join(parts, segment.shape)


def own_part(handle: Handle, segment: Segment, whole: torch.Tensor) -> torch.Tensor:
    """The part of a whole parameter that belongs to this rank's group, flat."""
    cut, ranks = segment.cut, handle.comm.mesh
    if cut is None:
        return whole.reshape(-1)
    return cut.part(whole, segment.shape, ranks.mesh.position(ranks.rank, (cut.axis,)))


def iterate_full_parameters(model: nn.Module, *, master: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, whole, on the CPU, one flat group in memory at a time; every rank must iterate to the end.

    Args:
        master: float32 master weights where there are some, else the compute dtype.
    """
    handle = handle_of(model)
    handle.runtime.drain_for_saving()
    handle.check_members()
    for unit in handle.runtime.units:
        for group in unit.groups:
            with report_disk_errors(handle):
                part = read_values(group, device=group.device) if master else rank_param(group)
            whole = gather_whole(handle, unit, group, part) if is_divided(group) else part
            for segment in group.plan.layout.segments:
                yield segment.name, whole_value(handle, segment, whole[segment.offset : segment.end]).cpu()


def full_state_dict(model: nn.Module, *, master: bool = True) -> dict[str, Any]:
    """The model's whole state dict (parameters under all their names, and buffers) on rank 0; {} on other ranks."""
    handle = handle_of(model)
    keep = handle.comm.mesh.rank == 0
    state: dict[str, Any] = {}
    for name, tensor in iterate_full_parameters(model, master=master):
        if keep:
            state[name] = tensor.clone()
    if not keep:
        return {}
    for alias, name in handle.plan.aliases.items():
        state[alias] = state[name]
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                state[f"{path}.{name}" if path else name] = buffer.to("cpu", copy=True)
    return state
