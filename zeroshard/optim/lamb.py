"""Lamb on sharded state: a parameter's step is scaled by the norm of the whole parameter over the norm of its update.

    moments -> squares of my pieces [ |p|^2, |u|^2 per parameter ] --one all-reduce--> ratio -> p -= rate * ratio * u

A parameter's pieces are on several ranks, so its norms are sums over ranks: two float64 per parameter, all in one small
all-reduce. The host reads nothing. The update u is computed twice, before and after the all-reduce, since keeping it
would take 4 bytes per parameter.

You et al. 2020 (arXiv:1904.00962, algorithm 2), with the conventions of DeepSpeed's Lamb, for its configs: the ratio is
clamped to [min_coeff, max_coeff], is 1 if a norm is 0, and bias corrections scale the rate, also that of the decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.regions import Region
from zeroshard.optim.rules import check_betas, check_common
from zeroshard.optim.saved_state import FlatState
from zeroshard.optim.segments import Flags, Piece, pieces_of
from zeroshard.optim.sources import ParamGroups, Source, fill_group
from zeroshard.optim.update_context import UpdateContext
from zeroshard.optim.updates import HostDriven
from zeroshard.tiers import Row, RowInPlace

DEFAULTS: Mapping[str, Any] = {
    "lr": 1e-3,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "eps_inside_sqrt": False,
    "weight_decay": 0.0,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
}


def lamb_source(
    groups: ParamGroups, defaults: Mapping[str, Any], client: torch.optim.Optimizer | None = None
) -> Source:
    """A source over `groups`. Raises PlanError for hyper-parameters out of range."""
    for group in groups:
        fill_group(group, {**DEFAULTS, **defaults})
        check_lamb(group)
    return Source(
        "Lamb",
        groups,
        {**DEFAULTS, **defaults},
        2,
        lambda context: HostDriven(LambUpdate(context), context.device),
        on_device=LambUpdate if find_spec("triton") is not None else None,
        parameter_sums=2,
        client=client,
    )


def check_lamb(hyper: Mapping[str, Any]) -> None:
    """Raises PlanError for hyper-parameters out of range."""
    check_common(hyper)
    check_betas(hyper)
    if not hyper["eps"] >= 0.0:
        raise PlanError(f"optimizer eps {hyper['eps']!r} must not be negative")
    if not 0.0 <= hyper["min_coeff"] <= hyper["max_coeff"]:
        raise PlanError(
            f"optimizer min_coeff {hyper['min_coeff']!r} and max_coeff {hyper['max_coeff']!r}: two numbers with "
            "0 <= min_coeff <= max_coeff are needed"
        )


class LambUpdate(FlatState):
    """The update of this rank's regions."""

    def __init__(self, context: UpdateContext) -> None:
        self.regions = context.regions
        self._context = context
        self._flags = Flags(context.regions, context.device)
        self._state = [(torch.zeros_like(region.master), torch.zeros_like(region.master)) for region in context.regions]
        self._squares = torch.zeros(2, self._flags.count, dtype=torch.float64, device=context.device)
        counted = [piece.flag for region in context.regions if context.counts(region) for piece in pieces_of(region)]
        self._counted = torch.tensor(counted, dtype=torch.int64).to(context.device)
        self._groups: Sequence[Mapping[str, Any]] = ()
        self._on = self._flags.owned
        self._rate = torch.zeros(self._flags.count, dtype=torch.float32, device=context.device)

    def prepare(self, coefficient: torch.Tensor, active: torch.Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        """See DeviceUpdate."""
        self._groups = groups
        self._on = active & self._flags.owned
        self._flags.steps += self._on
        norms: list[torch.Tensor] = []
        for number, region in enumerate(self.regions):
            grad = region.grad()
            for piece in pieces_of(region):
                self._average(number, piece, grad[piece.cut].float() * coefficient)
                if self._context.counts(region):
                    norms += [_norm(region.master[piece.cut]), _norm(self._direction(number, piece))]
        self._squares.zero_()
        if norms:
            self._squares[:, self._counted] = torch.stack(norms).view(-1, 2).t().square()
        if self._context.divided:
            self._context.control.wait(self._context.control.all_reduce(self._squares, "(norms)"))
        self._rate.copy_(self._rates(groups))

    def apply(self, number: int) -> None:
        """See DeviceUpdate."""
        region = self.regions[number]
        for piece in pieces_of(region):
            values = region.master[piece.cut]
            stepped = values - self._direction(number, piece).mul_(self._rate[piece.flag])
            values.copy_(torch.where(self._on[piece.flag], stepped, values))
            if region.param is not None:
                region.param[piece.cut].copy_(values)

    def _average(self, number: int, piece: Piece, grad: torch.Tensor) -> None:
        """Update the moments of an active parameter; an inactive one may have any gradient, also inf or NaN."""
        beta1, beta2 = self._groups[piece.group]["betas"]
        first, second = (moment[piece.cut] for moment in self._state[number])
        on = self._on[piece.flag]
        first.copy_(torch.where(on, first.lerp(grad, 1 - beta1), first))
        second.copy_(torch.where(on, (second * beta2).addcmul_(grad, grad, value=1 - beta2), second))

    def _direction(self, number: int, piece: Piece) -> torch.Tensor:
        hyper = self._groups[piece.group]
        first, second = (moment[piece.cut] for moment in self._state[number])
        inside = hyper["eps_inside_sqrt"]
        denominator = (second + hyper["eps"]).sqrt_() if inside else second.sqrt().add_(hyper["eps"])
        direction = first / denominator
        if hyper["weight_decay"]:
            direction.add_(self.regions[number].master[piece.cut], alpha=hyper["weight_decay"])
        return direction

    def _rates(self, groups: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """float64 (flags,): learning rate times bias corrections times trust ratio; 0 for inactive parameters."""
        value_of, steps = self._flags.value_of, self._flags.steps.clamp(min=1.0)
        corrected = torch.zeros_like(steps)
        for index, hyper in enumerate(groups):
            beta1, beta2 = hyper["betas"]
            rate = torch.full_like(steps, float(hyper["lr"]))
            if hyper["bias_correction"]:
                rate = rate * (1.0 - torch.pow(beta2, steps)).sqrt() / (1.0 - torch.pow(beta1, steps))
            corrected = torch.where(self._flags.belongs_to(index), rate, corrected)
        weights, directions = self._squares.sqrt()
        ratio = torch.minimum(
            torch.maximum(weights / directions, value_of(groups, "min_coeff")), value_of(groups, "max_coeff")
        )
        ratio = torch.where((weights > 0) & (directions > 0), ratio, 1.0)
        return torch.where(self._on, corrected * ratio, 0.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments by region, and the steps taken per parameter."""
        moments = {
            f"{number}.{name}": tensor
            for number, pair in enumerate(self._state)
            for name, tensor in zip(("exp_avg", "exp_avg_sq"), pair, strict=True)
        }
        return {**moments, "steps": self._flags.steps}

    def flat_states(self) -> list[tuple[Region, dict[str, Row]]]:
        """See FlatState."""
        return [
            (region, {"exp_avg": RowInPlace(first), "exp_avg_sq": RowInPlace(second)})
            for region, (first, second) in zip(self.regions, self._state, strict=True)
        ]

    def step_counts(self) -> list[list[float]]:
        """See FlatState."""
        counts = self._flags.steps.tolist()
        return [counts[region.first_flag : region.first_flag + len(region.groups)] for region in self.regions]

    def set_step(self, region: int, index: int, count: float) -> None:
        """See FlatState."""
        self._flags.steps[self.regions[region].first_flag + index] = count


def _norm(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float64)
