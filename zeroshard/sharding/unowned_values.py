"""Gathers the values of sharded parameters that no engine owns (see sharding.unowned)."""

from __future__ import annotations

import math

import torch

from zeroshard.comm.collectives import gather_over_default
from zeroshard.sharding.dtensors import holder_of
from zeroshard.sharding.unowned import UnownedShard, forget_unowned, unowned_shard_of


def gather_unowned(unowned: UnownedShard, device: torch.device) -> torch.Tensor:
    """The whole parameter on `device`, in the dtype of `unowned.values`; called by all ranks of the default group."""
    own = unowned.values.to(device)
    if unowned.ranks == 1:
        return own.clone().view(unowned.shape)
    numel, widest = math.prod(unowned.shape), max(end - start for start, end in unowned.parts)
    if own.numel() < widest:
        own = torch.cat([own, own.new_empty(widest - own.numel())])
    rows = own.new_empty(unowned.ranks * widest)
    gather_over_default(rows, own.contiguous())
    if all(start in (rank * widest, numel) for rank, (start, _) in enumerate(unowned.parts)):
        return rows[:numel].view(unowned.shape)  # all padding is behind the last element
    whole = rows.new_empty(numel)
    for row, (start, end) in zip(rows.view(unowned.ranks, widest), unowned.parts, strict=True):
        whole[start:end] = row[: end - start]
    return whole.view(unowned.shape)


def take_whole(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's values; those of an unowned parameter are gathered by all ranks, and its shard is dropped."""
    unowned = unowned_shard_of(parameter)
    if unowned is None:
        return holder_of(parameter).data
    forget_unowned(parameter)
    return gather_unowned(unowned, parameter.device)
