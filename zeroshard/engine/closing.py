"""Closing a sharded model: hooks and communicators go, and its parameters stay usable.

What rests whole stays whole. What is sharded over all ranks becomes loose (see sharding.loose): GatheredParameters
reads it and another `initialize` shards it again, with the precision of its master weights. No communication: a rank
that closes alone, in an error say, does not wait for others.
"""

from __future__ import annotations

from zeroshard.engine.between.closed_state import guard_closed_state
from zeroshard.engine.between.gathered import unmark_parameters
from zeroshard.engine.core.handle import Handle
from zeroshard.engine.memory.storage import Group
from zeroshard.sharding.loose import hang
from zeroshard.sharding.loose_guard import guard_loose


def close_handle(handle: Handle) -> None:
    """Close the model of `handle`."""
    handle.runtime.parking.reload()
    handle.close()
    unmark_parameters(handle)
    for unit in handle.runtime.units:
        for group in unit.groups:
            for parameter, empty in zip(group.parameters, group.empties, strict=True):
                parameter.grad = None
                if group.plan.param.axis == "dp":
                    parameter.data = empty
            if group.plan.param.axis == "dp":
                _hang(group)
    guard_loose(handle.runtime.model)
    guard_closed_state(handle.runtime.model, names=handle.runtime.names_in_state_dict)


def _hang(group: Group) -> None:
    layout = group.plan.layout
    values = group.shard
    if group.plan.update_axis == "dp":  # master weights in host memory stay there
        whole = group.master is not None and not group.split
        values = group.update_master if whole else group.master_values()
    for parameter, segment, index in zip(group.parameters, layout.segments, range(len(layout.segments)), strict=True):
        starts = [min(max(layout.shard_range(rank)[0], segment.offset), segment.end) for rank in range(layout.shards)]
        own, _ = group.own_part(index)
        hang(parameter, segment.shape, [*(start - segment.offset for start in starts), segment.numel], values[own])
