"""The schedules of torch that a config may name, as DeepSpeed lets it; names and defaults are torch's.

Those are here whose arguments JSON can hold and whose step needs none. The rest are made in the script and passed as
`lr_scheduler`. `last_epoch` is left out: a run goes on from a checkpoint, which has the place in the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from zeroshard.config.fields import Count, Flag, NonNegative, one_of, real, real_number, refuse, whole_number
from zeroshard.config.models import Section


def _optional(check: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value is None else check(value))


def _milestones(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise refuse("a list of whole numbers such as [30, 80]", value)
    return tuple(whole_number(0)(item) for item in value)


def _rates(value: Any) -> Any:
    check = real_number(0)
    return [check(rate) for rate in value] if isinstance(value, list) and value else check(value)


_CountOrNone = Annotated["int | None", _optional(whole_number(1))]
_Rates = Annotated["float | list[float]", BeforeValidator(_rates)]
_Share = Annotated[float, BeforeValidator(real_number(0, high=1))]
_Positive = Annotated[float, real(above=0)]


class StepLRParams(Section):
    """The rate times `gamma` after each `step_size` updates."""

    step_size: Count
    gamma: NonNegative = 0.1


class MultiStepLRParams(Section):
    """The rate times `gamma` at each of the `milestones`."""

    milestones: Annotated[tuple[int, ...], BeforeValidator(_milestones)]
    gamma: NonNegative = 0.1

    @classmethod
    def placeholder(cls) -> Any:
        """See Section."""
        return [1]


class ConstantLRParams(Section):
    """The rate times `factor` for `total_iters` updates."""

    factor: _Share = 1 / 3
    total_iters: Count = 5


class LinearLRParams(Section):
    """The rate times a factor that goes from `start_factor` to `end_factor`."""

    start_factor: Annotated[float, BeforeValidator(real_number(above=0, high=1))] = 1 / 3
    end_factor: _Share = 1.0
    total_iters: Count = 5


class ExponentialLRParams(Section):
    """The rate times `gamma` after each update."""

    gamma: NonNegative


class PolynomialLRParams(Section):
    """Down to 0 at `total_iters`."""

    total_iters: Count = 5
    power: NonNegative = 1.0


class CosineAnnealingLRParams(Section):
    """Half a cosine down to `eta_min` at `T_max`."""

    T_max: Count
    eta_min: NonNegative = 0.0


class CosineAnnealingWarmRestartsParams(Section):
    """Half cosines, one after the other, each `T_mult` times as long."""

    T_0: Count
    T_mult: Count = 1
    eta_min: NonNegative = 0.0


class CyclicLRParams(Section):
    """Up and down between two rates; the momentum goes the other way round."""

    base_lr: _Rates
    max_lr: _Rates
    step_size_up: Count = 2000
    step_size_down: _CountOrNone = None
    mode: Annotated[
        Literal["triangular", "triangular2", "exp_range"], one_of("triangular", "triangular2", "exp_range")
    ] = "triangular"
    gamma: NonNegative = 1.0
    cycle_momentum: Flag = True
    base_momentum: NonNegative = 0.8
    max_momentum: NonNegative = 0.9


class OneCycleLRParams(Section):
    """One rise to `max_lr` and one fall over `total_steps`, or `epochs` times `steps_per_epoch`."""

    max_lr: _Rates
    total_steps: _CountOrNone = None
    epochs: _CountOrNone = None
    steps_per_epoch: _CountOrNone = None
    pct_start: _Share = 0.3
    anneal_strategy: Annotated[Literal["cos", "linear"], one_of("cos", "linear")] = "cos"
    cycle_momentum: Flag = True
    base_momentum: NonNegative = 0.85
    max_momentum: NonNegative = 0.95
    div_factor: _Positive = 25.0
    final_div_factor: _Positive = 1e4
    three_phase: Flag = False


TORCH_SCHEDULERS: Mapping[str, type[Section]] = {
    "ConstantLR": ConstantLRParams,
    "CosineAnnealingLR": CosineAnnealingLRParams,
    "CosineAnnealingWarmRestarts": CosineAnnealingWarmRestartsParams,
    "CyclicLR": CyclicLRParams,
    "ExponentialLR": ExponentialLRParams,
    "LinearLR": LinearLRParams,
    "MultiStepLR": MultiStepLRParams,
    "OneCycleLR": OneCycleLRParams,
    "PolynomialLR": PolynomialLRParams,
    "StepLR": StepLRParams,
}
