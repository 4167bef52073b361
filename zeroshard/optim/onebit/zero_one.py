"""0/1 Adam (Lu et al. 2022, arXiv:2202.06009, algorithm 1): ever fewer variance steps, then ever fewer exchanges.

    until var_freeze_step   in steps of T_v: averaged gradients -> momentum, second moment
                            in the others:   gradients averaged in one bit -> momentum
                            T_v: every step, after `var_update_scaler` of them every second, then every fourth, ...
    afterwards              own gradients -> own momentum -> own parameters; u is the sum of rate * momentum
                            in steps of T_u: u averaged in one bit -> momentum = u / rates, parameters = anchor - u/root
                            T_u: every step, after `local_step_scaler` steps every second, ... `local_step_clipper`th

Between two steps of T_u the ranks' parameters differ. After such a step they are equal bit for bit, since they are
computed from the anchor, a copy from the last such step. Rejected: to subtract u from the parameters, which rounds
differently on each rank, so the ranks would diverge. Decay is decoupled, and at a step of T_u it decays the anchor.

Local steps need all state on each rank. With `local_step_clipper` 1 there are none, and u and anchor are not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.onebit.base import ActivePieces, Groups, OneBitUpdate
from zeroshard.optim.segments import pieces_of
from zeroshard.optim.update_context import UpdateContext


@dataclass(frozen=True)
class Policy:
    """In which steps the variance is updated and ranks average; see the module. The names are DeepSpeed's.

    Raises:
        PlanError: a number is below 1.
    """

    var_freeze_step: int = 100_000
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise PlanError(f"ZeroOneAdam {name} {value}: a whole number of at least 1 is needed")


@dataclass
class Interval:
    """Something is done every `every` steps; that number doubles after each `scaler` calls of `tick`, up to `most`."""

    scaler: int
    most: int | None = None
    every: int = 1
    count: int = 0

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def tick(self) -> None:
        self.count += 1
        if self.count == self.scaler:
            self.count = 0
            self.every = self.every * 2 if self.most is None else min(self.most, self.every * 2)


class ZeroOneAdamUpdate(OneBitUpdate):
    """The update of this rank's regions."""

    def __init__(self, context: UpdateContext, policy: Policy) -> None:
        super().__init__(context, policy.var_freeze_step)
        self._local = policy.local_step_clipper > 1
        if self._local and context.divided:
            raise PlanError(
                "ZeroOneAdam takes local steps, for which each rank needs the whole state: use stage 0, or set "
                "local_step_clipper to 1"
            )
        self._variance = Interval(policy.var_update_scaler)
        self._averaging = Interval(policy.local_step_scaler, most=policy.local_step_clipper)
        kept = self.regions if self._local else ()
        self._sums = [torch.zeros_like(region.master) for region in kept]
        self._anchors = [torch.zeros_like(region.master) for region in kept]
        self._rates = [0.0] * sum(len(region.groups) for region in self.regions)

    @property
    def _frozen(self) -> bool:
        return self._steps >= self._freeze_step

    @property
    def compressing(self) -> bool:
        """See CompressedUpdate."""
        return self._frozen or not self._variance.due(self._steps + 1)

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Groups) -> None:
        """See UpdateMethod; gradients are this rank's own while `compressing`."""
        updated = ActivePieces(active, [[p for p in pieces_of(region) if active[p.flag]] for region in self.regions])
        step = self._steps + 1
        if self._frozen:
            self._step_after_freeze(coefficient, updated, hyper, averages=self._averaging.due(step))
            self._averaging.tick()
        elif self.compressing:
            self._update_momentum_in_one_bit(coefficient, updated, hyper)
            self._step_warmup(updated, hyper)
        else:
            self._update_moments(coefficient, updated, hyper)
            self._step_warmup(updated, hyper)
            self._variance.tick()
        self._steps = step
        if step == self._freeze_step:
            self._end_warmup()

    def _end_warmup(self) -> None:
        super()._end_warmup()
        self._mean.reset_errors()
        for anchor, region in zip(self._anchors, self.regions if self._local else (), strict=True):
            anchor.copy_(region.master)

    def _update_momentum_in_one_bit(self, coefficient: float, updated: ActivePieces, groups: Groups) -> None:
        """Update the momentum with gradients that are averaged in one bit; the second moment does not change."""
        grads = [self._scaled(number, coefficient) for number in range(len(self.regions))]
        self._mean.average(grads, self._left_out(updated))
        for number, pieces in enumerate(updated.pieces):
            region, own = self.regions[number], self._own_momentum(number)
            grad = grads[number][region.start : region.start + own.numel()]
            for piece in pieces:
                beta1 = groups[piece.group]["betas"][0]
                own[piece.cut].mul_(beta1).add_(grad[piece.cut], alpha=1 - beta1)

    def _step_after_freeze(self, coefficient: float, updated: ActivePieces, groups: Groups, *, averages: bool) -> None:
        """Update momentum and parameters with this rank's own gradients; `averages` says that it is a step of T_u."""
        for number, region in enumerate(self.regions):
            grads = self._scaled(number, coefficient)
            for index, segment in enumerate(region.layout.segments):
                flag, group = region.first_flag + index, region.groups[index]
                if group >= 0 and updated.active[flag]:
                    beta1, cut = groups[group]["betas"][0], slice(segment.offset, segment.end)
                    self._momentum[number][cut].mul_(beta1).add_(grads[cut], alpha=1 - beta1)
                    self._rates[flag] += float(groups[group]["lr"])
        if not self._local:
            self._mean.average(self._momentum, self._left_out(updated))
            self._step_warmup(updated, groups)
            self._rates = [0.0] * len(self._rates)
            return
        for number, pieces in enumerate(updated.pieces):
            for piece in pieces:
                rate = float(groups[piece.group]["lr"])
                self._sums[number][piece.cut].add_(self._own_momentum(number)[piece.cut], alpha=rate)
                direction = self._direction(number, piece, groups[piece.group])
                self._write(self.regions[number], piece, direction, rate)
        if averages:
            self._restart_from_mean(groups)

    def _restart_from_mean(self, groups: Groups) -> None:
        """Average the sums of the local steps since the last step of T_u, and step from the anchor by the mean."""
        # A parameter without a gradient since then has nothing to average; these are the same on all ranks.
        skip = [
            [self._rates[region.first_flag + index] == 0.0 for index in range(len(region.layout.segments))]
            for region in self.regions
        ]
        self._mean.average(self._sums, skip)
        for number, region in enumerate(self.regions):
            for piece in pieces_of(region):
                total, hyper = self._rates[piece.flag], groups[piece.group]
                if total == 0.0:
                    continue
                mean, anchor = self._sums[number][piece.cut], self._anchors[number][piece.cut]
                self._own_momentum(number)[piece.cut].copy_(mean / total)
                moved = mean / self._root(self._second[number][piece.cut], hyper)
                anchor.mul_(1 - hyper["weight_decay"] * total).sub_(moved)
                region.master[piece.cut].copy_(anchor)
                if region.param is not None:
                    region.param[piece.cut].copy_(anchor)
                mean.zero_()
        self._rates = [0.0] * len(self._rates)

    def _scaled(self, number: int, coefficient: float) -> torch.Tensor:
        whole_grad = self.regions[number].whole_grad
        assert whole_grad is not None
        return whole_grad().float() * coefficient

    def _left_out(self, updated: ActivePieces) -> list[list[bool]]:
        return [
            [group < 0 or not updated.active[region.first_flag + index] for index, group in enumerate(region.groups)]
            for region in self.regions
        ]

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super()._named()
        for number, (total, anchor) in enumerate(zip(self._sums, self._anchors, strict=True)):
            yield f"{number}.sum", total
            yield f"{number}.anchor", anchor

    @property
    def _diverged(self) -> bool:
        """Whether ranks have taken local steps since they last averaged, so that their parameters differ."""
        return self._local and any(self._rates)

    def rank_tensors(self, *, saving: bool) -> dict[str, torch.Tensor]:
        """See SavedState: compression errors and, while the ranks' parameters differ, all state of this rank."""
        found = super().rank_tensors(saving=saving)
        if self._diverged or not saving:
            for number, (total, anchor) in enumerate(zip(self._sums, self._anchors, strict=True)):
                found[f"{number}.sum"], found[f"{number}.anchor"] = total, anchor
                found[f"{number}.exp_avg"] = self._momentum[number]
                found[f"{number}.parameters"] = self.regions[number].master
        return found

    def refusal(self, counters: Mapping[str, Any], *, same_ranks: bool) -> str | None:
        """See SavedState."""
        if len(counters["rates"]) != len(self._rates):
            return f"its ZeroOneAdam counts {len(counters['rates'])} parameters, this run's {len(self._rates)}"
        if not any(counters["rates"]):
            return None
        if not self._local:
            return "it was saved between local steps, which this run does not take (local_step_clipper is 1)"
        if not same_ranks:
            return (
                "it was saved between local steps of ZeroOneAdam, when each rank has parameters of its own: load it at "
                "as many ranks, or one that was saved after a step in which the ranks averaged"
            )
        return None

    def reset_state(self) -> None:
        """See SavedState."""
        super().reset_state()
        for interval in (self._variance, self._averaging):
            interval.every, interval.count = 1, 0
        self._rates = [0.0] * len(self._rates)

    def finish_load(self) -> None:
        """See SavedState. Equal parameters become the anchor; else each rank continues with its own."""
        super().finish_load()
        for region, anchor in zip(self.regions, self._anchors, strict=False):
            if not self._diverged:
                anchor.copy_(region.master)
            elif region.param is not None:
                region.param.copy_(region.master)

    def counters(self) -> dict[str, Any]:
        """See SavedState."""
        intervals = [[interval.every, interval.count] for interval in (self._variance, self._averaging)]
        return {**super().counters(), "intervals": intervals, "rates": self._rates}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        super().load_counters(counters)
        for interval, (every, count) in zip((self._variance, self._averaging), counters["intervals"], strict=True):
            interval.every, interval.count = int(every), int(count)
        self._rates = [float(rate) for rate in counters["rates"]]
