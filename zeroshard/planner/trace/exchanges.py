"""What a divided model's ranks send each other in forward and backward, noted where it happens in a trace.

    hidden --all-reduce--> hidden        what the forward and the backward of a border send, each with its payload

The plan knows what ZeRO sends. What the model itself sends between its own kernels, compute waits for. Rejected: a
count by formula (four all-reduces for each block), which is of one architecture.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Exchange:
    """One collective of the model's own.

    Attributes:
        kind: as `predict.collectives` knows it: all-reduce, all-gather, reduce-scatter, all-to-all.
        axis: of the mesh.
        nbytes: its payload.
    """

    kind: str
    axis: str
    nbytes: int


class Exchanges:
    """Collects what is sent until it is taken."""

    def __init__(self) -> None:
        self._found: Counter[Exchange] = Counter()

    def note(self, kind: str, axis: str, nbytes: int) -> None:
        self._found[Exchange(kind, axis, nbytes)] += 1

    def take(self) -> dict[Exchange, int]:
        """What was noted since the last call, and how often."""
        found, self._found = dict(self._found), Counter()
        return found


@dataclass(frozen=True)
class Border:
    """What a tensor meets where a divided model is joined: a collective forward, another in the backward.

    Attributes:
        forward, backward: kinds; "" where nothing is sent.
        moved: the result is another tensor than what came in (an all-to-all, an all-gather).
        parts: the last dim of the result has so many times as many elements (an all-gather).
    """

    exchanges: Exchanges
    axis: str
    forward: str = ""
    backward: str = ""
    moved: bool = False
    parts: int = 1

    def cross(self, x: torch.Tensor) -> torch.Tensor:
        """`x` behind the border."""
        return _Cross.apply(x, self)  # type: ignore[return-value]


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, border: Border) -> torch.Tensor:
        ctx.border = border
        out = x.view_as(x)
        if border.moved or border.parts > 1:
            out = x.new_empty((*x.shape[:-1], x.shape[-1] * border.parts))
        if border.forward:
            border.exchanges.note(border.forward, border.axis, out.numel() * out.element_size())
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        border: Border = ctx.border
        gradient = gradients[0]
        if border.backward:
            border.exchanges.note(border.backward, border.axis, gradient.numel() * gradient.element_size())
        if border.parts > 1:
            return gradient.new_empty((*gradient.shape[:-1], gradient.shape[-1] // border.parts)), None
        return torch.empty_like(gradient) if border.moved else gradient, None
