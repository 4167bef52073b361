"""Schedules of a config, and how the type of an optimizer or schedule is found.

Parameter names and defaults are DeepSpeed's. The optimizers are in `optimizers`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from zeroshard.config.fields import (
    Count,
    Flag,
    NonNegative,
    Size,
    one_of,
    real,
    real_number,
    whole,
    whole_number,
)
from zeroshard.config.models import Section
from zeroshard.config.optimizers import OPTIMIZER_ALIASES, OPTIMIZERS, UNBUILT_OPTIMIZERS
from zeroshard.config.problems import show
from zeroshard.config.torch_schedules import TORCH_SCHEDULERS


def _rates(value: Any) -> Any:
    check = real_number(0)
    return tuple(check(rate) for rate in value) if isinstance(value, list) and value else check(value)


def _rates_or_none(value: Any) -> Any:
    return None if value is None else _rates(value)


def _momenta(value: Any) -> Any:
    check = real_number(0, below=1)
    return tuple(check(momentum) for momentum in value) if isinstance(value, list) and value else check(value)


Momenta = Annotated["float | tuple[float, ...]", BeforeValidator(_momenta)]
"""One momentum, or one for each parameter group."""


def _size_or_none(value: Any) -> Any:
    return None if value is None else whole_number(0)(value)


Rates = Annotated["float | tuple[float, ...]", BeforeValidator(_rates)]
"""One rate, or one for each parameter group."""
RatesOrNone = Annotated["float | tuple[float, ...] | None", BeforeValidator(_rates_or_none)]
"""The same, or None for the rate that each group has."""
SizeOrNone = Annotated["int | None", BeforeValidator(_size_or_none)]
WarmupType = Annotated[Literal["log", "linear"], one_of("log", "linear")]


class WarmupLRParams(Section):
    """From `warmup_min_lr` to `warmup_max_lr` (null: the optimizer's rate) over the warm-up, then constant.

    A list gives each parameter group its rate.
    """

    warmup_min_lr: Rates = 0.0
    warmup_max_lr: RatesOrNone = None
    warmup_num_steps: Size = 1000
    warmup_type: WarmupType = "log"
    last_batch_iteration: Annotated[int, whole(-1)] = -1


class WarmupDecayLRParams(WarmupLRParams):
    """WarmupLR, then linearly down to `warmup_min_lr` at `total_num_steps`."""

    warmup_max_lr: RatesOrNone = 1e-3
    total_num_steps: Count


class WarmupCosineLRParams(Section):
    """Ratios of the optimizer's own rate: a warm-up, then half a cosine down to `cos_min_ratio`."""

    total_num_steps: Count
    warmup_min_ratio: NonNegative = 0.0
    warmup_num_steps: Size = 1000
    cos_min_ratio: NonNegative = 0.0001
    warmup_type: WarmupType = "log"
    last_batch_iteration: Annotated[int, whole(-1)] = -1


class OneCycleParams(Section):
    """A rise to `cycle_max_lr`, a fall, then a decay; the momentum goes the other way round.

    A null second size or stair count takes that of the first half; stair count 0 is a line, `decay_step_size` 0 no
    decay. With `cycle_momentum` an Adam's second beta becomes 0.99, as in DeepSpeed. A list gives each parameter group
    its rate or momentum.
    """

    cycle_min_lr: Rates
    cycle_max_lr: Rates
    decay_lr_rate: NonNegative = 0.0
    cycle_first_step_size: Count = 2000
    cycle_second_step_size: SizeOrNone = None
    cycle_first_stair_count: Size = 0
    cycle_second_stair_count: SizeOrNone = None
    decay_step_size: Size = 0
    cycle_momentum: Flag = True
    cycle_min_mom: Momenta = 0.8
    cycle_max_mom: Momenta = 0.9
    decay_mom_rate: Annotated[float, real()] = 0.0
    last_batch_iteration: Annotated[int, whole(-1)] = -1


class LRRangeTestParams(Section):
    """From `lr_range_test_min_lr` up without end, by `step_rate` times that in each `step_size` batches.

    A list gives each parameter group its rate.
    """

    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: Count = 2000
    lr_range_test_step_rate: NonNegative = 1.0
    lr_range_test_staircase: Flag = False
    last_batch_iteration: Annotated[int, whole(-1)] = -1


SCHEDULERS: Mapping[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
    **TORCH_SCHEDULERS,
}
TYPE_ALIASES: Mapping[str, str] = {**OPTIMIZER_ALIASES, "Cosine": "WarmupCosineLR"}
"""Names that fail or are unusual in DeepSpeed but say clearly what is meant."""


__all__ = [
    "OPTIMIZERS",
    "SCHEDULERS",
    "TYPE_ALIASES",
    "UNBUILT_OPTIMIZERS",
    "param_advice",
    "resolve_type",
]

_PARAM_HINTS = {
    "max_grad_norm": "did you mean the top-level key gradient_clipping?",
    "fused": "the plan chooses the kernel; remove it",
    "foreach": "the plan chooses the kernel; remove it",
    "learning_rate": "did you mean lr?",
}


def resolve_type(name: Any, built: Mapping[str, type[Section]], unbuilt: tuple[str, ...]) -> tuple[str | None, str]:
    """The type that a name means, whatever its case; or None and what is wrong with it."""
    if not isinstance(name, str):
        return None, f"must be one of {', '.join(built)}, not {show(name)}"
    aliases = {alias.lower(): target for alias, target in TYPE_ALIASES.items() if target in built}
    by_lower = {known.lower(): known for known in built} | aliases
    if name.lower() in by_lower:
        return by_lower[name.lower()], ""
    waiting = {known.lower(): known for known in unbuilt}
    if name.lower() in waiting:
        return None, f"{waiting[name.lower()]} is not built yet; use one of {', '.join(built)}"
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    close = close or difflib.get_close_matches(name.lower(), waiting, n=1, cutoff=0.6)
    if close:
        return None, f"unknown type {show(name)}; did you mean {(waiting | by_lower)[close[0]]}?"
    return None, f"unknown type {show(name)}; use one of {', '.join(built)}"


def param_advice(name: str, model: type[Section]) -> str:
    """What to write in place of an unknown parameter of an optimizer or schedule."""
    if name in _PARAM_HINTS:
        return _PARAM_HINTS[name]
    close = difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"the parameters are {', '.join(model.model_fields)}"
