"""The small transformer on parts of sequences: attention over the keys of all ranks, or over some heads of the whole.

    cp    a rank's queries, and the keys of all ranks of the axis
    sp    exchanges give each rank of the axis the tokens of all of them for some heads; within one part of `cp`

Either may be there, or both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.support.parallel_model import HEADS, WIDTH, Attention, Transformer
from zeroshard.parallel.exchange import exchange


class _Sequence(torch.autograd.Function):
    """The parts of all ranks of an axis, one after the other; their gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup, place: int) -> torch.Tensor:
        ctx.group, ctx.window = group, slice(place * part.shape[1], (place + 1) * part.shape[1])
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole[:, ctx.window], None, None


class Gathering(Attention):
    """Attention over parts of sequences.

    Args:
        group, place: the ranks over which keys are gathered, and this one's number; None where keys are whole.
        heads: the ranks over which heads are divided; None where each has all of them.
    """

    def __init__(self, group: dist.ProcessGroup | None, place: int, heads: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._group, self._place, self._heads = group, place, heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = [part(x).unflatten(-1, (-1, WIDTH // HEADS)) for part in (self.q, self.k, self.v)]
        if self._heads is not None:
            projected = [exchange(part, self._heads, 2, 1) for part in projected]
        query, *others = projected
        if self._group is not None:
            others = [_Sequence.apply(part.contiguous(), self._group, self._place) for part in others]
        begin, length, whole = self._place * query.shape[1], query.shape[1], others[0].shape[1]
        mask = torch.ones(whole, whole, dtype=torch.bool).tril()[begin : begin + length]
        heads = [part.transpose(1, 2) for part in (query, *others)]
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask).transpose(1, 2)
        if self._heads is not None:
            mixed = exchange(mixed, self._heads, 1, 2)
        return self.o(mixed.flatten(2))


def gathering(
    model: Transformer, group: dist.ProcessGroup | None, place: int, heads: dist.ProcessGroup | None = None
) -> nn.Module:
    """The model with such attention; the parameters stay what they are."""
    for index in range(2):
        path = f"blocks.{index}.attention"
        gathering = Gathering(group, place, heads)
        gathering.load_state_dict(model.get_submodule(path).state_dict())
        model.set_submodule(path, gathering)
    return model
