"""1-bit Lamb (Li et al. 2021, arXiv:2104.06069, algorithm 2): Lamb, then one-bit momentum whose ratios change slowly.

    warm-up      ratio = |p| / |u| within bounds, and a running mean of it
    afterwards   ratio = that mean * factor, and factor = max(sqrt(v frozen) / sqrt(v fresh)) within bounds, where v
                 fresh is updated with gradients that are computed from the averaged momentum

The factor changes by at most `factor_threshold` in each step. The paper also scales all momenta to one size before they
are compressed together; here each piece of a parameter has its own scale, so that would change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.optim.onebit import base
from zeroshard.optim.onebit.base import ActivePieces, Groups, OneBitUpdate
from zeroshard.optim.regions import Region
from zeroshard.optim.segments import Piece
from zeroshard.optim.update_context import UpdateContext
from zeroshard.tiers import Row, RowInPlace

Pair = tuple[torch.Tensor, torch.Tensor]
DEFAULTS: Mapping[str, Any] = {
    **base.DEFAULTS,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "coeff_beta": 0.9,
    "factor_max": 4.0,
    "factor_min": 0.5,
    "factor_threshold": 0.1,
}


class OneBitLambUpdate(OneBitUpdate):
    """The update of this rank's regions."""

    _needs_before = True

    def __init__(self, context: UpdateContext, freeze_step: int) -> None:
        super().__init__(context, freeze_step)
        self._fresh = [torch.zeros_like(second) for second in self._second]
        self._group_of = [group for region in context.regions for group in region.groups]
        self._ratios = [0.0] * len(self._group_of)
        self._factors = [1.0] * len(self._group_of)

    def _step_warmup(self, updated: ActivePieces, groups: Groups) -> None:
        weights, updates = self._norms(updated, lambda number, piece: self._weights_and_update(number, piece, groups))
        used = [1.0] * len(self._group_of)
        for flag, hyper in self._active(updated, groups):
            if weights[flag] and updates[flag]:
                used[flag] = min(max(weights[flag] / updates[flag], hyper["min_coeff"]), hyper["max_coeff"])
            beta = hyper["coeff_beta"]
            self._ratios[flag] = beta * self._ratios[flag] + (1 - beta) * used[flag]
        self._write_all(updated, groups, used)

    def _step_frozen(self, updated: ActivePieces, groups: Groups, before: Sequence[torch.Tensor]) -> None:
        maxima = torch.zeros(len(self._group_of), dtype=torch.float64, device=self._context.device)
        for number, pieces in enumerate(updated.pieces):
            for piece in pieces:
                self._update_fresh_second(number, piece, groups[piece.group], before[number])
                roots = [
                    self._root(second[piece.cut], groups[piece.group]) for second in self._frozen_and_fresh(number)
                ]
                maxima[piece.flag] = (roots[0] / roots[1]).max()
        if self._context.divided:
            control = self._context.control
            control.wait(control.all_reduce(maxima, "(ratios)", op=dist.ReduceOp.MAX))
        bare, decayed = self._norms(updated, lambda number, piece: self._bare_and_decayed(number, piece, groups))
        largest: list[float] = maxima.tolist()
        used = [1.0] * len(self._group_of)
        for flag, hyper in self._active(updated, groups):
            share = min(1.0, bare[flag] / decayed[flag]) if hyper["weight_decay"] and decayed[flag] else 1.0
            factor = largest[flag] * share + (1.0 - share)
            factor = min(max(factor, hyper["factor_min"]), hyper["factor_max"])
            last, threshold = self._factors[flag], hyper["factor_threshold"]
            self._factors[flag] = min(max(factor, last * (1 - threshold)), last * (1 + threshold))
            used[flag] = self._ratios[flag] * self._factors[flag]
        self._write_all(updated, groups, used)

    def _end_warmup(self) -> None:
        super()._end_warmup()
        for fresh, second in zip(self._fresh, self._second, strict=True):
            fresh.copy_(second)

    def _active(self, updated: ActivePieces, groups: Groups) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """All parameters that the step updates, on any rank, with their hyper-parameters; equal on all ranks."""
        for flag, group in enumerate(self._group_of):
            if group >= 0 and updated.active[flag]:
                yield flag, groups[group]

    def _update_fresh_second(self, number: int, piece: Piece, hyper: Mapping[str, Any], before: torch.Tensor) -> None:
        """Update the fresh second moment with the gradient that the change of the momentum gives."""
        beta1, beta2 = hyper["betas"]
        grad = (self._own_momentum(number)[piece.cut] - before[piece.cut] * beta1) / (1 - beta1)
        self._fresh[number][piece.cut].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def _frozen_and_fresh(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._second[number], self._fresh[number]

    def _weights_and_update(self, number: int, piece: Piece, groups: Groups) -> Pair:
        return self.regions[number].master[piece.cut], self._direction(number, piece, groups[piece.group])

    def _bare_and_decayed(self, number: int, piece: Piece, groups: Groups) -> Pair:
        hyper = groups[piece.group]
        return self._direction(number, piece, hyper, decay=False), self._direction(number, piece, hyper)

    def _norms(self, updated: ActivePieces, pair_of: Callable[[int, Piece], Pair]) -> tuple[list[float], list[float]]:
        """Two norms of each parameter over all ranks, by flag; `pair_of` returns the two tensors of a piece."""
        squares = torch.zeros(2, len(self._group_of), dtype=torch.float64, device=self._context.device)
        for number, pieces in enumerate(updated.pieces):
            for piece in pieces if self._context.counts(self.regions[number]) else ():
                for row, values in enumerate(pair_of(number, piece)):
                    squares[row, piece.flag] = torch.linalg.vector_norm(values, dtype=torch.float64).square()
        if self._context.divided:
            self._context.control.wait(self._context.control.all_reduce(squares, "(norms)"))
        first, second = squares.sqrt().tolist()
        return first, second

    def _write_all(self, updated: ActivePieces, groups: Groups, ratios: Sequence[float]) -> None:
        for number, pieces in enumerate(updated.pieces):
            for piece in pieces:
                hyper = groups[piece.group]
                rate = float(hyper["lr"]) * ratios[piece.flag]
                self._write(self.regions[number], piece, self._direction(number, piece, hyper), rate)

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super()._named()
        for number, fresh in enumerate(self._fresh):
            yield f"{number}.exp_avg_sq_fresh", fresh

    def flat_states(self) -> list[tuple[Region, dict[str, Row]]]:
        """See FlatState."""
        return [
            (region, {**state, "exp_avg_sq_fresh": RowInPlace(fresh)})
            for (region, state), fresh in zip(super().flat_states(), self._fresh, strict=True)
        ]

    def counters(self) -> dict[str, Any]:
        return {**super().counters(), "ratios": self._ratios, "factors": self._factors}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        super().load_counters(counters)
        self._ratios = [float(value) for value in counters["ratios"]]
        self._factors = [float(value) for value in counters["factors"]]
