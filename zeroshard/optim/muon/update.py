"""Muon on sharded state: the update of a matrix is its momentum, made orthogonal.

    divided:    momentum of my pieces --exchange--> matrices at their owners, Newton-Schulz --exchange--> my pieces
                in a few parts, so that one part travels while another is worked on
    undivided:  momentum --Newton-Schulz--> update, matrix by matrix, without a buffer

Parameters in groups whose `use_muon` is False (biases, norms, embeddings, the head) are updated by Adam with decoupled
decay. In the plan matrices have flat groups of their own, since they have one state tensor and not two.

Jordan et al. 2024; Liu et al. 2025 (arXiv:2502.16982) for `adjust_lr_fn="match_rms_adamw"`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.mesh import Axes
from zeroshard.optim.muon.exchange import WIRE, MatrixExchange
from zeroshard.optim.muon.newton_schulz import orthogonalize
from zeroshard.optim.regions import Region
from zeroshard.optim.saved_state import FlatState
from zeroshard.optim.segments import Flags, Piece, pieces_of
from zeroshard.optim.update_context import UpdateContext
from zeroshard.sharding.layout import matrix_shape
from zeroshard.tiers import Row, RowInPlace


class MatrixUpdate(FlatState):
    """The update of this rank's regions of matrices. Regions must number their flags from 0."""

    def __init__(self, context: UpdateContext) -> None:
        self.regions = context.regions
        self._flags = Flags(context.regions, context.device)
        self._state = [torch.zeros_like(region.master) for region in context.regions]
        divided: dict[Axes, list[tuple[int, Region]]] = {}
        for number, region in enumerate(context.regions):
            if region.divided:
                if len(region.owners) != len(region.layout.segments):
                    raise PlanError(
                        f"the plan names no owners for the matrices of {region.label}, which Muon needs whole; name "
                        "them in Recipe(matrices=...), or let zeroshard make the plan"
                    )
                divided.setdefault(region.axes, []).append((number, region))
        exchanges = {
            axes: MatrixExchange(members, context.axes[axes], context.device) for axes, members in divided.items()
        }
        self._exchanges = list(exchanges.values())
        self._exchange_of = {number: exchanges[axes] for axes, members in divided.items() for number, _ in members}
        self._groups: Sequence[Mapping[str, Any]] = ()
        self._coefficient = torch.zeros((), dtype=torch.float64, device=context.device)
        self._on = self._flags.owned
        self._not_applied: set[int] = set()

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the exchanges' buffers on this rank during a step."""
        return sum(exchange.buffer_nbytes for exchange in self._exchanges)

    def prepare(self, coefficient: torch.Tensor, active: torch.Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        """See DeviceUpdate. The exchange of divided matrices begins here."""
        self._groups, self._coefficient = groups, coefficient
        self._on = active & self._flags.owned
        self._not_applied = set(self._exchange_of)
        for exchange in self._exchanges:
            exchange.begin(self._fill, self._orthogonal)

    def _fill(self, number: int) -> None:
        """Update the momentum of a divided region's pieces and write what is sent to the owners."""
        exchange = self._exchange_of[number]
        for piece in pieces_of(self.regions[number]):
            exchange.piece(number, piece.index).copy_(self._momentum(number, piece))

    def apply(self, number: int) -> None:
        """See DeviceUpdate."""
        region, exchange = self.regions[number], self._exchange_of.get(number)
        if exchange is not None:
            exchange.finish(number)
        for piece in pieces_of(region):
            if exchange is not None:
                update = exchange.piece(number, piece.index)
            else:
                update = self._orthogonal(number, piece.index, self._momentum(number, piece).to(WIRE)).reshape(-1)
            self._step(region, piece, update)
        self._not_applied.discard(number)
        if not self._not_applied:
            for each in self._exchanges:
                each.end()

    def _momentum(self, number: int, piece: Piece) -> torch.Tensor:
        """Update the momentum of an active parameter; returns what is to be made orthogonal."""
        hyper, buffer = self._groups[piece.group], self._state[number][piece.cut]
        grad = self.regions[number].grad()[piece.cut].float() * self._coefficient
        momentum = hyper["momentum"]
        buffer.copy_(torch.where(self._on[piece.flag], buffer.lerp(grad, 1 - momentum), buffer))
        return grad.lerp(buffer, momentum) if hyper["nesterov"] else buffer

    def _orthogonal(self, number: int, index: int, flat: torch.Tensor) -> torch.Tensor:
        region = self.regions[number]
        if region.groups[index] < 0:
            return flat  # the optimizer does not have this parameter, and the result is not used
        batch, rows, columns = matrix_shape(region.layout.segments[index].shape)
        shape = (rows, columns) if batch == 1 else (batch, rows, columns)
        return orthogonalize(flat.view(shape), self._groups[region.groups[index]])

    def _step(self, region: Region, piece: Piece, update: torch.Tensor) -> None:
        hyper, values = self._groups[piece.group], region.master[piece.cut]
        rate = float(hyper["lr"])
        scale = lr_scale(region.layout.segments[piece.index].shape, hyper["adjust_lr_fn"])
        stepped = values.mul(1 - rate * hyper["weight_decay"]).add_(update, alpha=-(rate * scale))
        values.copy_(torch.where(self._on[piece.flag], stepped, values))
        if region.param is not None:
            region.param[piece.cut].copy_(values)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Momentum by region."""
        return {f"{number}.momentum_buffer": tensor for number, tensor in enumerate(self._state)}

    def flat_states(self) -> list[tuple[Region, dict[str, Row]]]:
        """See FlatState."""
        return [
            (region, {"momentum_buffer": RowInPlace(state)})
            for region, state in zip(self.regions, self._state, strict=True)
        ]

    def step_counts(self) -> None:
        """See FlatState: steps are not counted, since no update depends on their number."""
        return

    def set_step(self, region: int, index: int, count: float) -> None:
        """See FlatState."""


def lr_scale(shape: Sequence[int], adjust: str | None) -> float:
    """The factor of a matrix's rate: sqrt(max(1, rows/columns)), or one that gives updates of the size of Adam's."""
    _, rows, columns = matrix_shape(shape)
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / max(1, columns)))
