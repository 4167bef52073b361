"""Closes a sharded model: removes hooks and communicators, and keeps its parameters usable.

Parameters that rest whole stay whole. Sharded ones become unowned (see sharding.unowned): GatheredParameters reads them
and another `initialize` shards them again, with the precision of their master weights. If several subgroups of ranks
hold copies, the copy of the first subgroup is kept. Closing does not communicate, so that a rank that closes alone, for
example after an error, does not wait for others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch

from zeroshard.comm.mesh import RankMesh
from zeroshard.engine.core.handle import Handle
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.host_memory import available_bytes, has_host_memory
from zeroshard.engine.memory.rank_values import is_split, rank_param, rank_part, rank_shard, read_values
from zeroshard.engine.memory.scaled_group import ScaledGroup
from zeroshard.engine.memory.unit import Unit
from zeroshard.engine.outside_step.closed_state import guard_closed_state
from zeroshard.engine.outside_step.gathered import unmark_parameters
from zeroshard.engine.outside_step.offload_states import reload_states
from zeroshard.errors import SpillError, UsageError
from zeroshard.fp8.cast import decode
from zeroshard.fp8.convert import restore
from zeroshard.plan.groups import UnitPlan
from zeroshard.sharding.int8_layers import drop_int8_codes
from zeroshard.sharding.layout import Segment
from zeroshard.sharding.resting import show_values, unguarded
from zeroshard.sharding.unowned import keep_shard, rest_unowned
from zeroshard.sharding.unowned_guard import guard_unowned
from zeroshard.sharding.unpack import repack
from zeroshard.tiers import Row, loaded

_LOGGER = logging.getLogger("zeroshard")


def close_handle(handle: Handle, *, available: Callable[[], int | None] = available_bytes) -> None:
    """Close the model of `handle`. Raises UsageError inside of an open GatheredParameters of its parameters.

    Args:
        available: bytes of host memory that can be allocated; None if unknown.
    """
    _refuse_open(handle)
    reload_states(handle.runtime.model)
    handle.close()
    handle.runtime.reads.forget()
    unmark_parameters(handle)
    fits, mesh = _fits(handle, available()), handle.plan.mesh
    kept_by_others = False
    for unit in handle.runtime.units:
        for group in unit.groups:
            with unguarded():
                for parameter in group.parameters:
                    parameter.grad = None
            if group.plan.param.divided:
                _keep_shard(unit, group, handle.comm.mesh, fits=fits)
            elif isinstance(group, ScaledGroup):
                masters = mesh.size(group.plan.update_axes) == 1
                _decode(group, masters=masters)
                kept_by_others |= not masters
    if kept_by_others:
        _LOGGER.warning("close: fp8 weights keep their precision only; earlier checkpoints have the master weights")
    restore(handle.runtime.model)
    if handle.runtime.parameters.scaled is not None:
        handle.runtime.parameters.scaled.drop_codes()
    for memory in handle.runtime.storage.tiers.values():
        memory.close()
    repack(handle.runtime.model)
    drop_int8_codes(handle.runtime.model)
    guard_unowned(handle.runtime.model)
    guard_closed_state(handle.runtime.model, names=handle.runtime.names_in_state_dict)


def _decode(group: ScaledGroup, *, masters: bool) -> None:
    """Give parameters that rest whole in fp8 their values: from the master weights, or (not `masters`) from the codes
    if other ranks hold a part of the master weights, since those ranks need not be closing."""
    if masters:
        flat = rank_param(group)
        parts = [flat[segment.offset : segment.end].view(segment.shape) for segment in group.plan.layout.segments]
    else:
        parts = [decode(record.codes, record.unscale, group.dtype) for record in group.codes]
    for parameter, value in zip(group.parameters, parts, strict=True):
        show_values(parameter, value)


def _fits(handle: Handle, available: int | None) -> bool:
    """Whether host memory has room for this rank's state on disk, whose files are removed with the engine."""
    rows = [
        row for unit in handle.runtime.units for group in unit.groups if (row := _row_outside_memory(group)) is not None
    ]
    nbytes = sum(row.numel * row.dtype.itemsize for row in rows)
    if not nbytes or has_host_memory(nbytes, available):
        return True
    _LOGGER.warning(
        "close: %.2f GiB of this rank's parameters on disk don't fit into host memory and are dropped. Parameters that "
        "are in memory keep the compute dtype's precision, all others become NaN; earlier checkpoints have the values",
        nbytes / 2**30,
    )
    return False


def _row_outside_memory(group: Group) -> Row | None:
    """The row with the most precise values of a group, if they do not lie in memory."""
    row = group.row if group.master is None else group.master
    return None if row is None or row.values is not None else row


def _values(group: Group, whole: Row | None) -> torch.Tensor:
    """The values that this rank updates, in full precision; in compute dtype if the disk of the masters failed."""
    try:
        return read_values(group, device=group.device) if whole is None else loaded(whole, slice(None))
    except SpillError as error:
        _LOGGER.warning("close: parameters keep the compute dtype's precision: %s", error)
        return _compute_values(group)


def _compute_values(group: Group) -> torch.Tensor:
    """This rank's shard; NaN if its disk failed."""
    try:
        return rank_shard(group)
    except SpillError as error:
        _LOGGER.warning("close: parameters are lost and become NaN: %s", error)
        return torch.full_like(group.shard, math.nan, device=group.device)


def _refuse_open(handle: Handle) -> None:
    for unit in handle.runtime.units:
        for group in unit.groups:
            for index in sorted(group.opened):
                raise UsageError(
                    f"close: parameter {group.plan.layout.segments[index].name!r} is whole in an open "
                    "zeroshard.GatheredParameters block, whose end needs the model; leave the block before"
                )


def _keep_shard(unit: Unit, group: Group, mesh: RankMesh, *, fits: bool) -> None:
    layout = group.plan.layout
    if not fits and _row_outside_memory(group) is not None:
        nothing = torch.full((1,), math.nan, dtype=group.shard.dtype, device=group.device)
        values = group.shard if group.row is None else nothing.expand(group.shard.numel())
    elif group.plan.update_axes:
        # Master weights in host memory stay there; values on other tiers are read into memory, since these are closed.
        values = _values(group, None if is_split(group) else group.master)
    else:
        values = _compute_values(group)
    for parameter, segment, index in zip(group.parameters, layout.segments, range(len(layout.segments)), strict=True):
        parts = [_part(unit.plan, group, segment, mesh, rank) for rank in range(mesh.world_size)]
        own, _ = rank_part(group, index)
        keep_shard(parameter, segment.shape, parts, values[own] if group.counts else values.new_empty(0))
        rest_unowned(parameter, segment.name)


def _part(unit: UnitPlan, group: Group, segment: Segment, ranks: RankMesh, rank: int) -> tuple[int, int]:
    """The elements of a parameter that a rank keeps: those of its shard, if it belongs to the first copy of the state.

    For a parameter that the model divides: none if the rank has another part of it than this rank.
    """
    mesh, divided = ranks.mesh, group.plan.model_axes
    same = mesh.position(rank, divided) == mesh.position(ranks.rank, divided)
    axes = unit.axes_of(group.plan)
    if not same or not mesh.first(rank, (*axes, *divided)):
        return segment.numel, segment.numel
    start, end = group.plan.layout.shard_range(mesh.position(rank, axes))
    low = min(max(start, segment.offset), segment.end)
    return low - segment.offset, max(low, min(end, segment.end)) - segment.offset
