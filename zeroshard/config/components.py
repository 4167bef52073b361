"""Schedules of a config, and how the type of an optimizer or schedule is found.

Parameter names and defaults are DeepSpeed's. The optimizers are in `optimizers`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from zeroshard.config.fields import Count, NonNegative, Size, one_of, real_number, whole
from zeroshard.config.models import Section
from zeroshard.config.optimizers import OPTIMIZER_ALIASES, OPTIMIZERS, UNBUILT_OPTIMIZERS
from zeroshard.config.problems import show


def _rates(value: Any) -> Any:
    check = real_number(0)
    return tuple(check(rate) for rate in value) if isinstance(value, list) and value else check(value)


def _rates_or_none(value: Any) -> Any:
    return None if value is None else _rates(value)


Rates = Annotated["float | tuple[float, ...]", BeforeValidator(_rates)]
"""One rate, or one for each parameter group."""
RatesOrNone = Annotated["float | tuple[float, ...] | None", BeforeValidator(_rates_or_none)]
"""The same, or None for the rate that each group has."""
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


SCHEDULERS: Mapping[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}
TYPE_ALIASES: Mapping[str, str] = {**OPTIMIZER_ALIASES, "Cosine": "WarmupCosineLR"}
"""Names that fail or are unusual in DeepSpeed but say clearly what is meant."""

UNBUILT_SCHEDULERS = ("OneCycle", "LRRangeTest")

__all__ = [
    "OPTIMIZERS",
    "SCHEDULERS",
    "TYPE_ALIASES",
    "UNBUILT_OPTIMIZERS",
    "UNBUILT_SCHEDULERS",
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
