"""The values of parameters that are sharded though no sharded model owns them (see sharding.loose)."""

from __future__ import annotations

import torch

from zeroshard.comm.collectives import gather_over_default
from zeroshard.sharding.loose import LooseShard, forget_loose, loose_of


def gather_loose(loose: LooseShard, device: torch.device) -> torch.Tensor:
    """The whole parameter on `device`, in the dtype of `loose.values`; called by all ranks of the default group."""
    own = loose.values.to(device)
    if loose.ranks == 1:
        return own.clone().view(loose.shape)
    numel = loose.bounds[-1]
    sizes = [end - start for start, end in zip(loose.bounds, loose.bounds[1:], strict=False)]
    widest = max(sizes)
    if own.numel() < widest:
        own = torch.cat([own, own.new_empty(widest - own.numel())])
    rows = own.new_empty(loose.ranks * widest)
    gather_over_default(rows, own.contiguous())
    if all(size == widest or end == numel for size, end in zip(sizes, loose.bounds[1:], strict=True)):
        return rows[:numel].view(loose.shape)  # only what lies behind the last element is padding
    parts = [row[:size] for row, size in zip(rows.view(loose.ranks, widest), sizes, strict=True)]
    return torch.cat(parts).view(loose.shape)


def take_whole(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's values; those of a loose one are gathered (called by all ranks) and its shard is given up."""
    loose = loose_of(parameter)
    if loose is None:
        return parameter.data
    forget_loose(parameter)
    return gather_loose(loose, parameter.device)
