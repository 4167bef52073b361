"""Gives all ranks of an axis the values of its first rank, before each of them keeps a part of them.

    fingerprints    equal on all ranks     nothing is sent: most models are read from one checkpoint
                    not                    the first rank sends these tensors

Ranks that build a model without a seed have other values each, and scripts that load a checkpoint on rank 0 count on it
that sharding takes rank 0's. Parts of several models make none of them. Rejected: to send everything, a whole model
over a link; and a refusal, since what no axis divides is taken from rank 0 without a word.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from zeroshard.errors import PlanError
from zeroshard.sharding.dtensors import as_dtensor
from zeroshard.sharding.fingerprint import Fingerprints
from zeroshard.sharding.resting import is_resting

_SPREAD = 2
"""Numbers of what a rank has, each beside its negative, so that one maximum shows whether they differ."""


@torch.no_grad()
def take_first_values(tensors: Iterable[torch.Tensor], axis: dist.ProcessGroup, device: torch.device) -> None:
    """Overwrite what differs from the first rank of `axis`; called by all of its ranks.

    Tensors that hold no values, that ranks share already (zeroshard.Init) or that are no floating-point numbers stay
    as they are.

    Args:
        device: where tensors are while they are sent.

    Raises:
        PlanError: the ranks have other tensors, or tensors of other sizes.
    """
    values = [one for one in tensors if _has_values(one)]
    _check_alike(values, axis, device)
    own = torch.stack([Fingerprints(one.device).of([one])[0].to(device) for one in values]) if values else None
    if own is None:
        return
    most, least = own.clone(), own.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, axis)
    dist.all_reduce(least, dist.ReduceOp.MIN, axis)
    first = dist.get_global_rank(axis, 0)
    for index in (most != least).nonzero().view(-1).tolist():
        sent = values[index].detach().to(device).contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), first, axis)  # as bytes, since gloo lacks some dtypes
        if sent.data_ptr() != values[index].data_ptr():
            values[index].copy_(sent)


def _has_values(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_floating_point()
    return plain and not tensor.is_meta and not is_resting(tensor) and as_dtensor(tensor) is None and tensor.numel() > 0


def _check_alike(values: list[torch.Tensor], axis: dist.ProcessGroup, device: torch.device) -> None:
    own = [len(values), sum(one.nbytes for one in values)]
    found = torch.tensor([*own, *(-number for number in own)], dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, axis)
    if not torch.equal(found[:_SPREAD], -found[_SPREAD:]):
        raise PlanError(
            f"ranks {dist.get_process_group_ranks(axis)} built other models (here {own[0]} tensors with {own[1]} "
            "bytes), of which each would keep a part; build the same one on all of them"
        )
