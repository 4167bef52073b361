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
    """The compute-dtype parameters that this rank's optimizer step writes; on the meta device where those don't lie."""
    return group.shard if group.plan.update_axes else group.whole


def update_master(group: Group) -> torch.Tensor:
    """What the optimizer step keeps beside (or as) the parameters: float32, or the remainder of split master weights.

    Of master weights that do not lie in place it has the size and dtype alone, on the meta device.
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
    """What of this rank's part of the group belongs to parameters: (start, end), relative to the part."""
    return [(low, high) for _, low, high in group.plan.layout.pieces(*group.plan.layout.shard_range(group.rank))]


def step_param(group: Group) -> torch.Tensor | None:
    """What an update writes in compute dtype beside `update_master`; None where that is all there is, and for numbers
    in fp8, which are made of all master weights together."""
    if group.returning is not None:
        return group.returning
    return None if group.master is None or group.plan.scaled else update_param(group)


def step_grad(group: Group) -> torch.Tensor:
    """The reduced gradients where an update reads them."""
    return update_grad(group) if group.landed is None else group.landed
