"""Reads and writes the parameter values of a group that this rank keeps: those that it updates, or its frozen shard.

                  element of `rank_range`
    float32       the master weight; the parameter is its rounded copy in compute dtype
    split         the parameter and a 16-bit remainder, which together are the master weight
    no master     the parameter
    fp8           the master weight; codes and scales are made after all ranks have written (engine.core.scaled_weights)

All code that reads or sets parameters outside of a step (checkpoints, GatheredParameters, `safe_*`) uses this module,
so that no master weight is forgotten. Rejected: writing only the parameters and updating master weights in the next
step, which would lose the precision beyond the compute dtype.
"""

from __future__ import annotations

import torch

from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.update_view import update_param, update_range
from zeroshard.optim.split_master import join, split
from zeroshard.sharding.layout import Segment
from zeroshard.tiers import RowInPlace, loaded, store, values_of

_ALL = slice(None)


def rank_range(group: Group) -> tuple[int, int]:
    """The elements whose values this rank keeps."""
    if group.plan.trainable:
        return update_range(group)
    if group.plan.param.divided:
        return group.plan.layout.shard_range(group.rank)
    return 0, group.plan.layout.numel


def rank_param(group: Group, cut: slice = _ALL) -> torch.Tensor:
    """The compute-dtype parameters of `rank_range`: a view where they rest, or a copy that is read from their tier.

    Args:
        cut: which part of them.
    """
    if group.plan.scaled:
        return _kept_master(group)[cut].to(group.dtype)
    return loaded(group.row, cut) if group.row is not None else _resting_param(group)[cut]


def _kept_master(group: Group) -> torch.Tensor:
    assert group.master is not None
    return values_of(group.master)


def _resting_param(group: Group) -> torch.Tensor:
    if group.plan.trainable:
        return update_param(group)
    return group.shard if group.plan.param.divided else group.whole


def _write_param(group: Group, cut: slice, values: torch.Tensor) -> None:
    if group.plan.scaled:
        return
    if group.row is not None:
        store(group.row, cut, values)
    else:
        _resting_param(group)[cut].copy_(values)


def rank_shard(group: Group) -> torch.Tensor:
    """This rank's shard of the parameters: a view, or a copy read from its tier; for fp8 the decoded values."""
    if group.plan.scaled:
        master = _kept_master(group)
        own = slice(None) if group.plan.update_axes else slice(*group.plan.layout.shard_range(group.rank))
        return master[own].to(group.dtype)
    return group.shard if group.row is None else loaded(group.row, _ALL)


def is_divided(group: Group) -> bool:
    """Whether other ranks keep other elements of the group."""
    return rank_range(group) != (0, group.plan.layout.numel)


def is_split(group: Group) -> bool:
    """Whether master weights are the parameters and a 16-bit remainder."""
    return group.master is not None and group.master.dtype == torch.int16


def rank_part(group: Group, index: int) -> tuple[slice, slice]:
    """The part of a parameter that this rank keeps: as a slice of `rank_range`, and of the flat parameter."""
    return _overlap(group.plan.layout.segments[index], *rank_range(group))


def read_values(group: Group, cut: slice = _ALL, device: torch.device | None = None) -> torch.Tensor:
    """Elements of `rank_range`, in float32 where there are master weights; not copied where they lie on `device`.

    Args:
        cut: which part of them.
        device: the device of the result; None for wherever they rest.
    """
    if group.master is None:
        return _to(rank_param(group, cut), device)
    master = loaded(group.master, cut)
    if not is_split(group):
        return _to(master, device)
    param = rank_param(group, cut)
    where = param.device if device is None else device
    return join(param.to(where), master.to(where))


def write_values(group: Group, cut: slice, values: torch.Tensor) -> None:
    """Give elements of `rank_range` new values, master weights first."""
    if group.master is None:
        _write_param(group, cut, values)
        return
    if not is_split(group):
        store(group.master, cut, values)
        _write_param(group, cut, values.to(group.master.dtype))
        return
    upper, remainder = split(values.to(group.device).float())
    store(group.master, cut, remainder)
    _write_param(group, cut, upper)


def write_parameter(group: Group, index: int, value: torch.Tensor) -> None:
    """Give parameter `index` its whole value: write all of its state that this rank holds."""
    segment, flat = group.plan.layout.segments[index], value.detach().reshape(-1)
    if group.master is not None:
        own, of_value = rank_part(group, index)
        _write_master(group, own, flat[of_value].to(torch.promote_types(flat.dtype, torch.float32)))
    _write_compute(group, segment, flat)


def write_changed(group: Group, index: int, value: torch.Tensor, before: torch.Tensor | None = None) -> None:
    """As `write_parameter`, from compute dtype, but master weights of unchanged elements keep their precision.

    Args:
        before: the whole parameter before a change in place; by default it is read from its shard.
    """
    segment, flat = group.plan.layout.segments[index], value.detach().reshape(-1)
    if group.master is not None:
        own, of_value = rank_part(group, index)
        old, new = read_values(group, own, group.device), flat[of_value].to(group.device)
        current = rank_param(group, own).to(group.device) if before is None else before.reshape(-1)[of_value]
        _write_master(group, own, torch.where(current == new, old, new.to(old.dtype)))
    _write_compute(group, segment, flat)


def update_master_weights(group: Group, index: int, value: torch.Tensor) -> None:
    """Update master weights from a whole parameter that was changed in place; unchanged elements keep precision."""
    own, of_value = rank_part(group, index)
    old, new = read_values(group, own, group.device), value.reshape(-1)[of_value]
    _write_master(group, own, torch.where(old.to(new.dtype) == new, old, new.to(old.dtype)))


def _write_master(group: Group, own: slice, values: torch.Tensor) -> None:
    assert group.master is not None
    store(group.master, own, split(values.to(group.device))[1] if is_split(group) else values)


def _write_compute(group: Group, segment: Segment, flat: torch.Tensor) -> None:
    if group.plan.scaled:
        return
    if is_split(group) and flat.dtype != group.whole.dtype:
        flat = split(flat.float())[0]  # rounded as its master weights are
    if not group.plan.param.divided:
        group.whole[segment.offset : segment.end].copy_(flat)
    else:
        own, of_value = _overlap(segment, *group.plan.layout.shard_range(group.rank))
        store(RowInPlace(group.shard) if group.row is None else group.row, own, flat[of_value])


def _to(values: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    return values if device is None else values.to(device)


def _overlap(segment: Segment, start: int, end: int) -> tuple[slice, slice]:
    """What a segment and [start, end) have in common: as a slice of the range, and of the segment."""
    low = max(start, segment.offset)
    high = max(low, min(end, segment.end))
    return slice(low - start, high - start), slice(low - segment.offset, high - segment.offset)
