"""1-bit Adam: a warm-up with averaged gradients, then the momentum is averaged in one bit; the base of the others.

    warm-up (freeze_step steps)   averaged gradients -> momentum and second moment of my shard -> update
    at its end                    the whole momentum is gathered once; the second moment is frozen
    afterwards                    own gradients -> whole momentum -> OneBitMean -> update of my shard

Each rank needs the whole momentum, since its own gradients change all of it; at stage 1 only master weights and second
moments are sharded. Tang et al. 2021 (arXiv:2102.02888, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.mesh import DATA
from zeroshard.optim.onebit.mean import OneBitMean
from zeroshard.optim.regions import Region
from zeroshard.optim.saved_state import FlatState
from zeroshard.optim.segments import Piece, pieces_of
from zeroshard.optim.update_context import UpdateContext
from zeroshard.tiers import Row, RowInPlace

Groups = Sequence[Mapping[str, Any]]
DEFAULTS: Mapping[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "eps_inside_sqrt": False,
    "weight_decay": 0.0,
}


@dataclass(frozen=True)
class ActivePieces:
    """What a step updates.

    Attributes:
        active: of all trainable parameters, whether each is updated.
        pieces: per region, the pieces of active parameters.
    """

    active: Sequence[bool]
    pieces: Sequence[Sequence[Piece]]


class OneBitUpdate(FlatState):
    """1-bit Adam's update of this rank's regions.

    Args:
        freeze_step: steps of the warm-up.
    """

    def __init__(self, context: UpdateContext, freeze_step: int) -> None:
        for region in context.regions:
            if region.axes != DATA or region.whole_grad is None:
                raise PlanError(
                    f"the plan shards the gradients of {region.label}, or shards within subgroups: 1-bit optimizers "
                    "run at stages 0 and 1 over all ranks only"
                )
        self.regions = context.regions
        self._context = context
        self._freeze_step = freeze_step
        self._steps = 0
        layouts = [region.layout for region in context.regions]
        self._mean = OneBitMean(layouts, context.control, context.device)
        self._momentum = [torch.zeros(layout.numel, dtype=torch.float32, device=context.device) for layout in layouts]
        self._second = [torch.zeros_like(region.master) for region in context.regions]

    @property
    def compressing(self) -> bool:
        """See CompressedUpdate."""
        return self._steps >= self._freeze_step

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Groups) -> None:
        """See UpdateMethod; gradients are this rank's own while `compressing`."""
        updated = ActivePieces(active, [[p for p in pieces_of(region) if active[p.flag]] for region in self.regions])
        if self.compressing:
            before = (
                [self._own_momentum(number).clone() for number in range(len(self.regions))]
                if self._needs_before
                else []
            )
            self._update_and_average_momentum(coefficient, active, hyper)
            self._step_frozen(updated, hyper, before)
        else:
            self._update_moments(coefficient, updated, hyper)
            self._step_warmup(updated, hyper)
        self._steps += 1
        if self._steps == self._freeze_step:
            self._end_warmup()

    _needs_before = False
    """Whether `_step_frozen` needs the momentum from before the step."""

    def _step_warmup(self, updated: ActivePieces, groups: Groups) -> None:
        """Update parameters in the warm-up, as Adam does, after the moments."""
        for number, pieces in enumerate(updated.pieces):
            for piece in pieces:
                hyper = groups[piece.group]
                self._write(self.regions[number], piece, self._direction(number, piece, hyper), float(hyper["lr"]))

    def _step_frozen(self, updated: ActivePieces, groups: Groups, before: Sequence[torch.Tensor]) -> None:
        """Update parameters after the warm-up; the momentum has been averaged.

        Args:
            before: per region, the momentum of this rank's shard before the step; empty unless `_needs_before`.
        """
        self._step_warmup(updated, groups)

    def _end_warmup(self) -> None:
        self._gather_momentum()

    def _gather_momentum(self) -> None:
        for number, region in enumerate(self.regions):
            if region.divided:
                control = self._context.control
                control.wait(control.all_gather(self._momentum[number], self._own_momentum(number), "(momentum)"))

    def _own_momentum(self, number: int) -> torch.Tensor:
        """This rank's shard of the momentum of a region, a view."""
        region = self.regions[number]
        return self._momentum[number][region.start : region.start + region.master.numel()]

    def _update_moments(self, coefficient: float, updated: ActivePieces, groups: Groups) -> None:
        for number, pieces in enumerate(updated.pieces):
            grads, own, second = self.regions[number].grad(), self._own_momentum(number), self._second[number]
            for piece in pieces:
                beta1, beta2 = groups[piece.group]["betas"]
                grad = grads[piece.cut].float() * coefficient
                own[piece.cut].mul_(beta1).add_(grad, alpha=1 - beta1)
                second[piece.cut].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def _update_and_average_momentum(self, coefficient: float, active: Sequence[bool], groups: Groups) -> None:
        """Update the whole momentum with this rank's own gradients, then average it over the ranks."""
        skip: list[list[bool]] = []
        for region, momentum in zip(self.regions, self._momentum, strict=True):
            assert region.whole_grad is not None
            grads, left_out = region.whole_grad(), []
            for index, segment in enumerate(region.layout.segments):
                group = region.groups[index]
                on = group >= 0 and active[region.first_flag + index]
                left_out.append(not on)
                if on:
                    beta1 = groups[group]["betas"][0]
                    cut = slice(segment.offset, segment.end)
                    momentum[cut].mul_(beta1).add_(grads[cut].float() * coefficient, alpha=1 - beta1)
            skip.append(left_out)
        self._mean.average(self._momentum, skip)

    def _direction(self, number: int, piece: Piece, hyper: Mapping[str, Any], *, decay: bool = True) -> torch.Tensor:
        """Momentum over the root of the second moment, plus decay. Like the papers, it corrects no bias."""
        found = self._own_momentum(number)[piece.cut] / self._root(self._second[number][piece.cut], hyper)
        if decay and hyper["weight_decay"]:
            found.add_(self.regions[number].master[piece.cut], alpha=hyper["weight_decay"])
        return found

    @staticmethod
    def _root(second: torch.Tensor, hyper: Mapping[str, Any]) -> torch.Tensor:
        return (second + hyper["eps"]).sqrt_() if hyper["eps_inside_sqrt"] else second.sqrt().add_(hyper["eps"])

    def _write(self, region: Region, piece: Piece, direction: torch.Tensor, rate: float) -> None:
        region.master[piece.cut].sub_(direction * rate)
        if region.param is not None:
            region.param[piece.cut].copy_(region.master[piece.cut])

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, errors in enumerate(self._mean.errors):
            yield f"{number}.exp_avg", self._momentum[number]
            yield f"{number}.exp_avg_sq", self._second[number]
            yield f"{number}.worker_error", errors.worker
            yield f"{number}.server_error", errors.server

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments and compression errors by region."""
        return dict(self._named())

    def flat_states(self) -> list[tuple[Region, dict[str, Row]]]:
        """See FlatState."""
        return [
            (
                region,
                {"exp_avg": RowInPlace(self._own_momentum(number)), "exp_avg_sq": RowInPlace(self._second[number])},
            )
            for number, region in enumerate(self.regions)
        ]

    def step_counts(self) -> None:
        """See FlatState: all parameters share one count."""
        return

    def set_step(self, region: int, index: int, count: float) -> None:
        """See FlatState."""

    def reset_state(self) -> None:
        """See SavedState."""
        self._steps = 0
        for tensor in self.tensors().values():
            tensor.zero_()

    def rank_tensors(self, *, saving: bool) -> dict[str, torch.Tensor]:
        """See SavedState: this rank's compression errors; a run at another number of ranks starts from 0."""
        return {name: tensor.reshape(-1) for name, tensor in self._named() if name.endswith("_error")}

    def counters(self) -> dict[str, Any]:
        """See SavedState."""
        return {"steps": self._steps}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """See SavedState."""
        self._steps = int(counters["steps"])

    def finish_load(self) -> None:
        """See SavedState: after the warm-up every rank has the whole momentum."""
        if self.compressing:
            self._gather_momentum()
