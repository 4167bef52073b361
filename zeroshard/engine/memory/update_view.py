"""A group as the optimizer sees it on this rank: the elements that its step updates, and their gradients.

    layout         [ rank 0 . . . | rank 1 . . . | rank 2 . . . ]
    update_range                    ^ start  end ^                  all of it where the plan divides no update

The tensors are the group's own; nothing is copied here. Rejected: a second object with these tensors, which would have
to be renewed whenever a plan is adopted or a slot moves.
"""

from __future__ import annotations

import torch

from zeroshard.engine.memory.group import Group


def update_range(group: Group) -> tuple[int, int]:
    """The elements that this rank's optimizer step updates."""
    if not group.plan.update_axes:
        return 0, group.plan.layout.numel
    return group.plan.layout.shard_range(group.rank)


def update_param(group: Group) -> torch.Tensor:
    """The compute-dtype parameters that this rank's optimizer step writes; a meta tensor if they do not lie in place.
    The compute-dtype parameters that this rank's optimizer step writes; a meta tensor if they do not lie in place."""
    return group.shard if group.plan.update_axes else group.whole


def update_master(group: Group) -> torch.Tensor:
    """The master weights of the optimizer step: float32, the remainder of split ones, or the parameters themselves.

    For master weights that do not lie in place it is a meta tensor of their size and dtype.
    """
    if group.master is None:
        return update_param(group)
    values = group.master.values
    return torch.empty(group.master.numel, dtype=group.master.dtype, device="meta") if values is None else values


def update_grad(group: Group) -> torch.Tensor:
    """The reduced gradients of the elements that this rank updates."""
    assert group.grad is not None
    return own_grad(group) if group.plan.update_axes else group.grad


def own_grad(group: Group) -> torch.Tensor:
    """This rank's part of the reduced gradients."""
    assert group.grad is not None
    assert group.plan.grad is not None
    if group.plan.grad.divided:
        return group.grad
    start, end = group.plan.layout.shard_range(group.rank)
    return group.grad[start:end]


def own_pieces(group: Group) -> list[tuple[int, int]]:
    """The pieces of this rank's part of the group that belong to parameters: (start, end), relative to the part."""
    return [(low, high) for _, low, high in group.plan.layout.pieces(*group.plan.layout.shard_range(group.rank))]


def step_param(group: Group) -> torch.Tensor | None:
    """The compute-dtype parameters that an update writes beside `update_master`.

    None if there are only master weights, and for fp8 codes, which are made of all master weights together.
    """
    if group.returning is not None:
        return group.returning
    return None if group.master is None or group.plan.scaled else update_param(group)


def step_grad(group: Group) -> torch.Tensor:
    """The reduced gradients where an update reads them."""
    return update_grad(group) if group.landed is None else group.landed
