"""The small transformer with attention over the keys of all ranks of an axis along which sequences are divided."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.support.parallel_model import WIDTH, Attention, Transformer


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
    """Attention of this rank's queries over the keys and values of all ranks of an axis."""

    def __init__(self, group: dist.ProcessGroup, place: int) -> None:
        super().__init__()
        self._group, self._place = group, place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        keys, values = (_Sequence.apply(part(x).contiguous(), self._group, self._place) for part in (self.k, self.v))
        heads = [part.unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for part in (self.q(x), keys, values)]
        begin = self._place * length
        mask = torch.ones(keys.shape[1], keys.shape[1], dtype=torch.bool).tril()[begin : begin + length]
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask)
        return self.o(mixed.transpose(1, 2).flatten(2))


def gathering(model: Transformer, group: dist.ProcessGroup, place: int) -> nn.Module:
    """The model with attention over an axis; the parameters stay what they are."""
    for index in range(2):
        path = f"blocks.{index}.attention"
        gathering = Gathering(group, place)
        gathering.load_state_dict(model.get_submodule(path).state_dict())
        model.set_submodule(path, gathering)
    return model
