"""Sends each token to the ranks of its experts, and what they make of it back: two exchanges that autograd knows.

    rows, by expert     rank 0  a0 a0 a2 a3     rank 1  b1 b3 b3         experts 0, 1 on rank 0; 2, 3 on rank 1
    --- counts, then rows, all-to-all --->
    arrived             rank 0  a0 a0 | b1      rank 1  a2 a3 | b3 b3    by the rank they come from, then by expert
    --- the experts, then all-to-all back --->
    returned            in the order of the rows

Nothing is padded and nothing dropped, so the result does not depend on how even the choice of experts is. A rank that
gets no row takes part all the same, in the backward too. The counts come to the host, once for each dispatch: they are
the sizes of what is sent. Rejected: equal parts for all experts (a capacity), which drops tokens or sends padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zeroshard.sharding.dtensors import as_dtensor


class Exchanging(Protocol):
    """Where the rows of a rank go (see Dispatch)."""

    @property
    def order(self) -> torch.Tensor: ...

    @property
    def experts(self) -> torch.Tensor: ...

    @property
    def received(self) -> list[int]: ...

    def there(self, rows: torch.Tensor) -> torch.Tensor: ...

    def back(self, rows: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Dispatch:
    """Where the rows of this rank go, and which ones come here.

    Attributes:
        order: numbers of the pairs of a token and an expert, by expert.
        sent, received: rows to and from each rank of the axis.
        experts: of each row that arrives, the number of its expert among those of this rank.
    """

    group: dist.ProcessGroup | None
    order: torch.Tensor
    sent: list[int]
    received: list[int]
    experts: torch.Tensor

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in the order of pairs, of the tokens that chose experts here, from all ranks."""
        return rows if self.group is None else _Exchange.apply(rows, self.group, self.received, self.sent)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """What was made of them on all ranks, for this rank's pairs in their own order, (pairs, ...)."""
        sorted_rows = rows if self.group is None else _Exchange.apply(rows, self.group, self.sent, self.received)
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(self.order.numel(), device=self.order.device)
        return sorted_rows[places]


def make_dispatch(pairs: torch.Tensor, experts: int, group: dist.ProcessGroup | None) -> Dispatch:
    """Let the ranks of `group` tell each other how many rows they have for whom; called by all of them.

    Args:
        pairs: the expert of each pair of a token and an expert, out of all experts.
        experts: of all ranks; each has as many, in the order of ranks.
        group: None where this rank has all experts.
    """
    order = torch.argsort(pairs, stable=True)
    if group is None:
        return Dispatch(group, order, [pairs.numel()], [pairs.numel()], pairs[order])
    ranks = group.size()
    sent = torch.bincount(pairs, minlength=experts).view(ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sizes = torch.stack((sent.sum(dim=1), received.sum(dim=1))).tolist()
    own = torch.arange(experts // ranks, device=pairs.device).repeat(ranks)
    arrived = torch.repeat_interleave(own, received.view(-1), output_size=sum(sizes[1]))
    return Dispatch(group, order, sizes[0], sizes[1], arrived)


def compute_arrived(
    dispatch: Exchanging, rows: torch.Tensor, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What `compute(rows, experts)` makes of the rows that arrive, of which there are some.

    All of them pass at once, or, under `torch.use_deterministic_algorithms(True)`, those of each rank by themselves:
    products then have the rows that they have in one process, and gradients of weights are summed over ranks likewise.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return compute(rows, dispatch.experts)
    parts = zip(rows.split(dispatch.received), dispatch.experts.split(dispatch.received), strict=True)
    return torch.cat([compute(some, experts) for some, experts in parts if len(some)])


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """The weights of this rank's experts."""
    divided = as_dtensor(parameter)
    return parameter if divided is None else divided.to_local()


def attached(nothing: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """No rows, as a result of the weights: the backward of this rank takes part in the exchange, and has gradients."""
    for weight in weights:
        if weight.requires_grad:
            nothing = nothing + weight.reshape(-1)[:1].sum().to(nothing.dtype)
    return nothing


class _Exchange(torch.autograd.Function):
    """Rows to all ranks of a group; their gradients go the same way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, arriving: list[int], leaving: list[int]
    ) -> torch.Tensor:
        ctx.group, ctx.arriving, ctx.leaving = group, arriving, leaving
        return _exchange(rows, group, arriving, leaving)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.group, ctx.leaving, ctx.arriving), None, None, None


def _exchange(rows: torch.Tensor, group: dist.ProcessGroup, arriving: list[int], leaving: list[int]) -> torch.Tensor:
    rows = rows.contiguous()
    out = rows.new_empty((sum(arriving), *rows.shape[1:]))
    # As bytes: not every backend sends every dtype, and nothing is computed on the way.
    dist.all_to_all_single(_bytes(out), _bytes(rows), arriving, leaving, group=group)
    return out


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(rows.shape[0], math.prod(rows.shape[1:])).view(torch.uint8)
