"""Makes the optimizer's view of a sharded model: the flat regions that this rank updates, and its communicators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zeroshard.engine.core.handle import Handle
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.tiers import Tiers
from zeroshard.engine.memory.update_view import step_grad, step_param, update_master, update_range
from zeroshard.optim.regions import Region
from zeroshard.optim.update_context import UpdateContext
from zeroshard.plan.dtypes import state_dtype, torch_dtype
from zeroshard.tiers import Row


def make_update_context(handle: Handle, groups: Sequence[Mapping[str, Any]]) -> UpdateContext:
    """The regions, device and communicators for this rank's update."""
    comm = handle.comm
    axes = {**comm.reduces, handle.plan.mesh.names: comm.control}
    return UpdateContext(make_regions(handle, groups), handle.device, comm.control, axes)


def make_regions(handle: Handle, groups: Sequence[Mapping[str, Any]]) -> list[Region]:
    """The regions that this rank updates, with the optimizer group of each parameter."""
    group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
    regions: list[Region] = []
    first_flag, tiers = 0, handle.runtime.storage.tiers
    window, ranks = handle.runtime.storage.window, handle.comm.mesh
    for unit in handle.runtime.units:
        for group in unit.trainable:
            regions.append(
                Region(
                    label=f"{unit.label} ({group.plan.param.dtype})",
                    layout=group.plan.layout,
                    start=update_range(group)[0],
                    master=update_master(group),
                    param=step_param(group),
                    grad=partial(step_grad, group),
                    first_flag=first_flag,
                    groups=[group_of.get(id(parameter), -1) for parameter in group.parameters],
                    axes=unit.plan.axes_of(group.plan),
                    counts=ranks.mesh.first(ranks.rank, (*group.plan.update_axes, *group.plan.model_axes)),
                    divided=group.plan.updated_in_parts,
                    blocks=None if group.plan.moments is None else group.plan.moments.blocks,
                    owners=group.plan.owners,
                    factor_ranks=group.plan.factor_ranks,
                    state_dtype=_state_dtype(group),
                    whole_grad=partial(_whole_grad, group) if _has_whole_grad(group) else None,
                    allocate=_allocate(group, tiers),
                    off_device=_outside_device(group),
                    row=_row_outside_memory(group.row if group.master is None else group.master),
                    param_row=None if group.master is None else group.row,
                    window=window if group.plan.passes_windows else None,
                    window_numel=handle.plan.policy.window_numel,
                )
            )
            first_flag += len(group.parameters)
    return regions


def _row_outside_memory(row: Row | None) -> Row | None:
    """A row whose elements have to be moved first; None for one that lies in place."""
    return None if row is None or row.values is not None else row


def _state_dtype(group: Group) -> torch.dtype:
    """Of an update's state, also where the plan counts none."""
    moments = group.plan.moments
    return torch_dtype(state_dtype(group.plan.param.dtype) if moments is None else moments.dtype)


def _allocate(group: Group, tiers: Tiers) -> Callable[[int, torch.dtype], Row] | None:
    """Allocates an update's state on its tier; None for the device."""
    if not group.plan.updated_off_device:
        return None
    kept = group.plan.moments or group.plan.master or group.plan.param
    return tiers[kept.tier].allocate


def _outside_device(group: Group) -> frozenset[str]:
    """Those of an update's operands that do not rest on the device: 'master', 'param', 'grad'."""
    plan, found = group.plan, set[str]()
    if plan.master is None:  # the parameters are their own master weights
        found |= {"master"} if plan.param.off_device else set()
    else:
        found |= {"master"} if plan.master.off_device else set()
        found |= {"param"} if plan.param.off_device else set()
    return frozenset(found | ({"grad"} if plan.grad_off_device else set()))


def _has_whole_grad(group: Group) -> bool:
    return group.plan.grad is not None and not group.plan.grad.divided


def _whole_grad(group: Group) -> torch.Tensor:
    assert group.grad is not None
    return group.grad
