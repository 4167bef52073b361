"""Builds the schedule that a config names: one of DeepSpeed's five, or one of torch's."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from zeroshard.errors import ConfigError
from zeroshard.optim.schedules.cycle import LRRangeTest, OneCycle
from zeroshard.optim.schedules.warmup import WARMUP_TYPES, WarmupCosineLR, WarmupDecayLR, WarmupLR

SCHEDULES: Mapping[str, type[LRScheduler]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "Cosine": WarmupCosineLR,
    "OneCycle": OneCycle,
    "LRRangeTest": LRRangeTest,
}
"""The names of DeepSpeed's schedules; `Cosine` is an alias of `WarmupCosineLR`."""

TORCH_SCHEDULES = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
)
"""Schedules of torch whose arguments are JSON values and whose `step` needs none (unlike ReduceLROnPlateau's)."""


def build_scheduler(optimizer: Optimizer, type: str, params: Mapping[str, Any]) -> LRScheduler:
    """The scheduler that `scheduler.type` and `scheduler.params` of a config name, over `optimizer`.

    Raises:
        ConfigError: an unknown name or argument (with the most similar known one), a missing argument, or a value out
            of range.
    """
    cls = _schedule_class(type)
    known = [name for name in inspect.signature(cls).parameters if name != "optimizer"]
    for name in params:
        if name not in known:
            raise ConfigError(f"scheduler.params.{name}: {type} has no such argument; {_nearest(name, known)}")
    try:
        inspect.signature(cls).bind(optimizer, **params)
    except TypeError as error:
        raise ConfigError(f"scheduler.params: {type}: {error}; give it in the config") from error
    warmup = params.get("warmup_type", "log")
    if warmup not in WARMUP_TYPES:  # a script's own schedule falls back with a warning
        raise ConfigError(f"scheduler.params: {type}: warmup_type must be 'log' or 'linear', got {warmup!r}")
    try:
        return cls(optimizer, **params)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"scheduler.params: {error}") from error


def _schedule_class(name: str) -> type[LRScheduler]:
    if name in SCHEDULES:
        return SCHEDULES[name]
    if name in TORCH_SCHEDULES:
        return getattr(lr_scheduler, name)
    known = [*SCHEDULES, *TORCH_SCHEDULES]
    raise ConfigError(
        f"scheduler.type: no scheduler {name!r}; {_nearest(name, known)}. "
        "Any other torch scheduler can be made in the script and given as lr_scheduler"
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
