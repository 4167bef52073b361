"""The exchange of Ulysses: ranks that have parts of a sequence, for all heads, get the whole of it for some heads.

    rank 0   tokens 0 1   heads a b              rank 0   tokens 0 1 2 3   head a
    rank 1   tokens 2 3   heads a b      <->     rank 1   tokens 0 1 2 3   head b

An all-to-all; its gradient is the exchange back, so a backward sends in the order in which the forward did, on each
rank (arXiv 2309.14509). Rejected: gathering keys and values on every rank, which holds the whole sequence for
all heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def exchange(tensor: torch.Tensor, group: dist.ProcessGroup, split: int, join: int) -> torch.Tensor:
    """Cut `tensor` along dim `split` into a part for each rank, and join what they send along dim `join`.

    The ranks' tensors have the same shape, and the number of ranks divides dim `split`.
    """
    return _Exchange.apply(tensor, group, split % tensor.dim(), join % tensor.dim())


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, split: int, join: int) -> torch.Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _exchanged(tensor, group, split, join)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _exchanged(gradients[0], ctx.group, ctx.join, ctx.split), None, None, None


def _exchanged(tensor: torch.Tensor, group: dist.ProcessGroup, split: int, join: int) -> torch.Tensor:
    parts = tensor.unflatten(split, (group.size(), -1)).movedim(split, 0).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.movedim(0, join).flatten(join, join + 1)


def gather_parts(part: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """The parts of all ranks one after the other along `dim`; of numbers without a gradient."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim=dim)
