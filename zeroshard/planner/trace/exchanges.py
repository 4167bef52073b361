"""Notes during a trace what the ranks of a divided model send each other in forward and backward.

    hidden --all-reduce--> hidden        an exchange point notes the collective of its forward and of its backward

The plan knows what ZeRO sends. The collectives here are the model's own; they run between its kernels, and compute
waits for them. Rejected: a count by a formula (four all-reduces per block), which holds for one architecture only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Exchange:
    """One of the model's own collectives.

    Attributes:
        kind: as `predict.collectives` knows it: all-reduce, all-gather, reduce-scatter, all-to-all.
        axis: the mesh axis that it runs over.
        nbytes: its payload, in bytes.
    """

    kind: str
    axis: str
    nbytes: int


class Exchanges:
    """Collects the exchanges of a trace until they are taken."""

    def __init__(self) -> None:
        self._found: Counter[Exchange] = Counter()

    def note(self, kind: str, axis: str, nbytes: int) -> None:
        self._found[Exchange(kind, axis, nbytes)] += 1

    def take(self) -> dict[Exchange, int]:
        """The exchanges noted since the last call, and how often each was."""
        found, self._found = dict(self._found), Counter()
        return found


@dataclass(frozen=True)
class ExchangePoint:
    """A place in a divided model where ranks exchange a tensor: one collective in forward, one in the backward.

    Attributes:
        forward, backward: kinds of collectives; "" where nothing is sent.
        moved: the result is a new tensor (as of an all-to-all or an all-gather), not the input.
        parts: the size of the result's last dim, as a multiple of the input's (an all-gather).
    """

    exchanges: Exchanges
    axis: str
    forward: str = ""
    backward: str = ""
    moved: bool = False
    parts: int = 1

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """`x` after the exchange; the collectives of forward and backward are noted."""
        return _ExchangeFunction.apply(x, self)  # type: ignore[return-value]


class _ExchangeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, point: ExchangePoint) -> torch.Tensor:
        ctx.point = point
        out = x.view_as(x)
        if point.moved or point.parts > 1:
            out = x.new_empty((*x.shape[:-1], x.shape[-1] * point.parts))
        if point.forward:
            point.exchanges.note(point.forward, point.axis, out.numel() * out.element_size())
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        point: ExchangePoint = ctx.point
        gradient = gradients[0]
        if point.backward:
            point.exchanges.note(point.backward, point.axis, gradient.numel() * gradient.element_size())
        if point.parts > 1:
            return gradient.new_empty((*gradient.shape[:-1], gradient.shape[-1] // point.parts)), None
        return torch.empty_like(gradient) if point.moved else gradient, None
