"""0/1 Adam (Lu et al. 2022, arXiv:2202.06009, algorithm 1): fewer variance steps, then fewer steps that talk at all.

    until var_freeze_step   in steps of T_v: averaged gradients -> momentum, second moment
                            in the others:   gradients averaged in one bit -> momentum
                            T_v: every step, after `var_update_scaler` of them every second, then every fourth, ...
    afterwards              own gradients -> own momentum -> own parameters; u sums up what the momentum did
                            in steps of T_u: u averaged in one bit -> momentum = u / rates, parameters = anchor - u/root
                            T_u: every step, after `local_step_scaler` steps every second, ... `local_step_clipper`th

Between two steps of T_u the ranks' parameters differ; after one they are equal bit for bit, since they start from the
anchor, a copy from the last such step. Rejected: to take u back out of the parameters, which rounds differently on each
rank, so that they drift apart. Decay is decoupled, and at such a step it is that of the anchor.

Local steps need all state on each rank. With `local_step_clipper` 1 there are none, and u and anchor are not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.onebit.base import Due, Groups, OneBitUpdate
from zeroshard.optim.segments import pieces_of
from zeroshard.optim.update_context import UpdateContext


@dataclass(frozen=True)
class Policy:
    """When variance is updated and when ranks talk; see the module. Names are DeepSpeed's."""

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
    """Every how many steps something is done: doubled after each `scaler` counts, up to `most`."""

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
                "ZeroOneAdam takes local steps, for which each rank needs all of the state: use stage 0, or set "
                "local_step_clipper to 1"
            )
        self._variance = Interval(policy.var_update_scaler)
        self._talk = Interval(policy.local_step_scaler, most=policy.local_step_clipper)
        kept = self.regions if self._local else ()
        self._sums = [torch.zeros_like(region.master) for region in kept]
        self._anchors = [torch.zeros_like(region.master) for region in kept]
        self._rates = [0.0] * sum(len(region.hyper) for region in self.regions)

    @property
    def _frozen(self) -> bool:
        return self._steps >= self._freeze_step

    @property
    def compressing(self) -> bool:
        """See CompressedUpdate."""
        return self._frozen or not self._variance.due(self._steps + 1)

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Groups) -> None:
        """See UpdateMethod; gradients are this rank's own while `compressing`."""
        due = Due(active, [[p for p in pieces_of(region) if active[p.flag]] for region in self.regions])
        step = self._steps + 1
        if self._frozen:
            self._step_late(coefficient, due, hyper, talk=self._talk.due(step))
            self._talk.tick()
        elif self.compressing:
            self._move_by_bits(coefficient, due, hyper)
            self._step_warm(due, hyper)
        else:
            self._move_moments(coefficient, due, hyper)
            self._step_warm(due, hyper)
            self._variance.tick()
        self._steps = step
        if step == self._freeze_step:
            self._end_warm_up()

    def _end_warm_up(self) -> None:
        super()._end_warm_up()
        self._mean.forget()
        for anchor, region in zip(self._anchors, self.regions if self._local else (), strict=True):
            anchor.copy_(region.master)

    def _move_by_bits(self, coefficient: float, due: Due, groups: Groups) -> None:
        """Move the momentum by gradients that are averaged in one bit; the second moment stays."""
        grads = [self._scaled(number, coefficient) for number in range(len(self.regions))]
        self._mean.average(grads, self._skips(due))
        for number, pieces in enumerate(due.pieces):
            region, own = self.regions[number], self._own(number)
            grad = grads[number][region.start : region.start + own.numel()]
            for piece in pieces:
                beta1 = groups[piece.group]["betas"][0]
                own[piece.cut].mul_(beta1).add_(grad[piece.cut], alpha=1 - beta1)

    def _step_late(self, coefficient: float, due: Due, groups: Groups, *, talk: bool) -> None:
        """Move momentum and parameters by this rank's own gradients; in steps of T_u start anew from the mean."""
        for number, region in enumerate(self.regions):
            grads = self._scaled(number, coefficient)
            for index, segment in enumerate(region.layout.segments):
                flag, group = region.first_flag + index, region.hyper[index]
                if group >= 0 and due.active[flag]:
                    beta1, cut = groups[group]["betas"][0], slice(segment.offset, segment.end)
                    self._momentum[number][cut].mul_(beta1).add_(grads[cut], alpha=1 - beta1)
                    self._rates[flag] += float(groups[group]["lr"])
        if not self._local:
            self._mean.average(self._momentum, self._skips(due))
            self._step_warm(due, groups)
            self._rates = [0.0] * len(self._rates)
            return
        for number, pieces in enumerate(due.pieces):
            for piece in pieces:
                rate = float(groups[piece.group]["lr"])
                self._sums[number][piece.cut].add_(self._own(number)[piece.cut], alpha=rate)
                direction = self._direction(number, piece, groups[piece.group])
                self._write(self.regions[number], piece, direction, rate)
        if talk:
            self._start_anew(groups)

    def _start_anew(self, groups: Groups) -> None:
        """Average what the momenta did since the last time, and take the step from the anchor by that."""
        # A parameter without a gradient since then has nothing to average; which ones is equal on all ranks.
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
                self._own(number)[piece.cut].copy_(mean / total)
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

    def _skips(self, due: Due) -> list[list[bool]]:
        return [
            [group < 0 or not due.active[region.first_flag + index] for index, group in enumerate(region.hyper)]
            for region in self.regions
        ]

    def _step_frozen(self, due: Due, groups: Groups, before: Sequence[torch.Tensor]) -> None:
        raise AssertionError("late steps are taken by _step_late")

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super()._named()
        for number, (total, anchor) in enumerate(zip(self._sums, self._anchors, strict=True)):
            yield f"{number}.sum", total
            yield f"{number}.anchor", anchor

    @property
    def _apart(self) -> bool:
        """Whether ranks have taken local steps since they last talked: parameters and momenta are each rank's own."""
        return self._local and any(self._rates)

    def rank_tensors(self, *, saving: bool) -> dict[str, torch.Tensor]:
        """What compression left over and, while ranks are apart, all that a rank has of its own and the anchor."""
        found = super().rank_tensors(saving=saving)
        if self._apart or not saving:
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
                "as many ranks, or one that was saved after a step in which the ranks talked"
            )
        return None

    def reset_state(self) -> None:
        """See SavedState."""
        super().reset_state()
        for interval in (self._variance, self._talk):
            interval.every, interval.count = 1, 0
        self._rates = [0.0] * len(self._rates)

    def finish_load(self) -> None:
        """See SavedState. Together, the ranks' parameters are the anchor; apart, each takes up its own again."""
        super().finish_load()
        for region, anchor in zip(self.regions, self._anchors, strict=False):
            if not self._apart:
                anchor.copy_(region.master)
            elif region.param is not None:
                region.param.copy_(region.master)

    def counters(self) -> dict[str, Any]:
        """See SavedState."""
        intervals = [[interval.every, interval.count] for interval in (self._variance, self._talk)]
        return {**super().counters(), "intervals": intervals, "rates": self._rates}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        super().load_counters(counters)
        for interval, (every, count) in zip((self._variance, self._talk), counters["intervals"], strict=True):
            interval.every, interval.count = int(every), int(count)
        self._rates = [float(rate) for rate in counters["rates"]]
