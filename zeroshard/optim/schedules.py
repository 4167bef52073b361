"""Learning rate schedules of the DeepSpeed config: WarmupLR, WarmupDecayLR, WarmupCosineLR, and torch's own by name.

The values are those of DeepSpeed 0.19.8, oddities included, so that a run that moves here keeps its curve. With `i` the
index of the last batch (-1 before the first, 0 after the first optimizer step) and `w = max(2, warmup_num_steps)`:

    i = -1        the rate at construction: warmup_min_lr, or 0 for WarmupCosineLR (whatever warmup_min_ratio says)
    0 <= i < w    gamma = log(i + 1) / log(w)  or  i / w  (so the first two optimizer steps run at the minimum)
    w <= i        WarmupLR 1; WarmupDecayLR a line to 0 at i = total; WarmupCosineLR half a cosine, over at total - 1

Every class is a torch `LRScheduler`, since trainers test for that, with `i = last_epoch - 1`. `LambdaLR` was rejected:
it multiplies the initial rate of a group, while WarmupLR and WarmupDecayLR go between two absolute rates, and its state
would carry closures. The state is the batch index alone, as DeepSpeed saves it, so either side reads the other's.
"""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from zeroshard.errors import ConfigError, UsageError, ZeroShardWarning

WARMUP_TYPES = ("log", "linear")


class _IndexedSchedule(LRScheduler, ABC):
    """A schedule whose rates are a pure function of the index of the last batch.

    Args:
        optimizer: its groups' rates are set here and at each `step`.
        last_batch_iteration: -1 for a new run; to go on after batch `n` pass `n`, or load a state.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1):
        for group in optimizer.param_groups:
            rate = group["lr"]
            group.setdefault("initial_lr", rate.clone() if isinstance(rate, torch.Tensor) else rate)
        # torch takes one step at construction, which lands on index `last_batch_iteration`.
        super().__init__(optimizer, last_epoch=last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        return self.last_epoch - 1

    @abstractmethod
    def rates_at(self, iteration: int) -> list[float]:
        """The rate of each group once batch `iteration` is over; -1 is the start."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [*self.rates_at(self.last_batch_iteration)]

    def step(self, epoch: int | None = None) -> None:
        """Goes to the next batch, or to the batch index `epoch` (the argument keeps torch's name)."""
        if epoch is not None:
            self.last_epoch = epoch  # the step below adds the one by which the two counts differ
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the index and sets the groups' rates from it, by the arguments of this object, not of the saved one.

        Raises:
            UsageError: there is no `last_batch_iteration` in the state.
        """
        if "last_batch_iteration" not in state_dict:
            raise UsageError(
                f"the state of {type(self).__name__} has no 'last_batch_iteration' (it has {sorted(state_dict)}): "
                "it was saved by another scheduler; load it with the scheduler that saved it"
            )
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        for group, rate in zip(self.optimizer.param_groups, self.rates_at(self.last_batch_iteration), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [
            rate.clone() if isinstance(rate, torch.Tensor) else rate
            for rate in (group["lr"] for group in self.optimizer.param_groups)
        ]


class _Warmup(_IndexedSchedule):
    """What the three warm-ups share: the length and shape of the rise."""

    def __init__(self, optimizer: Optimizer, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int):
        name = type(self).__name__
        if isinstance(warmup_num_steps, bool) or not isinstance(warmup_num_steps, int) or warmup_num_steps < 0:
            raise UsageError(f"{name}: warmup_num_steps must be an integer of 0 or more, got {warmup_num_steps!r}")
        if warmup_type not in WARMUP_TYPES:
            raise UsageError(f"{name}: warmup_type must be 'log' or 'linear', got {warmup_type!r}")
        # One step would divide by log(1); none at all (refused by DeepSpeed today) means full rate from the start.
        self.warmup_num_steps = max(2, warmup_num_steps) if warmup_num_steps else 0
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def _rise(self, iteration: int) -> float:
        """The part of the rise that is behind, 0 to 1, for 0 <= iteration < warmup_num_steps."""
        if self.warmup_type == "log":
            return math.log(iteration + 1) / math.log(self.warmup_num_steps)
        return iteration / self.warmup_num_steps

    def _warn_if_shorter(self, total_num_steps: int) -> None:
        if total_num_steps < self.warmup_num_steps:
            warnings.warn(
                f"{type(self).__name__}: total_num_steps {total_num_steps} is less than warmup_num_steps "
                f"{self.warmup_num_steps}: the rate falls to its end as soon as the warm-up is over",
                ZeroShardWarning,
                stacklevel=3,
            )


class WarmupLR(_Warmup):
    """Rises from warmup_min_lr to warmup_max_lr over warmup_num_steps, then stays.

    Args:
        warmup_min_lr: one rate, or one for each group of the optimizer.
        warmup_max_lr: the same; None takes the rate that each group has.
        warmup_num_steps: 1 counts as 2; 0 is no warm-up.
        warmup_type: "log" or "linear".

    Raises:
        UsageError: a list whose length is not the number of groups, or a value out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.min_lrs = self._per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def _per_group(self, optimizer: Optimizer, name: str, value: float | Sequence[float] | None) -> list[float]:
        groups = optimizer.param_groups
        if value is None:
            return [float(group.get("initial_lr", group["lr"])) for group in groups]
        if isinstance(value, (int, float)):
            return [float(value)] * len(groups)
        if len(value) != len(groups):
            raise UsageError(
                f"{type(self).__name__}: {name} has {len(value)} values but the optimizer has {len(groups)} groups; "
                "give one number, or one for each group"
            )
        return [float(item) for item in value]

    def rates_at(self, iteration: int) -> list[float]:
        gamma = self._gamma(iteration)
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _gamma(self, iteration: int) -> float:
        if iteration >= self.warmup_num_steps or self.warmup_num_steps == 0:
            return self._after_warmup(iteration)
        return self._rise(max(0, iteration))  # gamma is 0 at the start as after the first batch

    def _after_warmup(self, iteration: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then a straight line down that reaches warmup_min_lr at total_num_steps and stays there.

    Args:
        total_num_steps: optimizer steps in the whole run.
        warmup_max_lr: 0.001 unless given, as in DeepSpeed; None takes the rate that each group has.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = _positive(self, "total_num_steps", total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self._warn_if_shorter(total_num_steps)

    def _after_warmup(self, iteration: int) -> float:
        left = self.total_num_steps - max(0, iteration)
        return max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Each group's own rate times a ratio: up from warmup_min_ratio to 1, then half a cosine down to cos_min_ratio.

    Args:
        total_num_steps: optimizer steps in the whole run; cos_min_ratio is reached at the last and kept.
        warmup_min_ratio: where the rise starts. The rate before the first batch is 0 all the same, as in DeepSpeed.
        warmup_num_steps: 1 counts as 2; 0 is no warm-up.
        cos_min_ratio: where the fall ends.
        warmup_type: "log" or "linear".
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = _positive(self, "total_num_steps", total_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self._warn_if_shorter(total_num_steps)

    def rates_at(self, iteration: int) -> list[float]:
        ratio = self.ratio_at(iteration)
        return [float(base) * ratio for base in self.base_lrs]

    def ratio_at(self, iteration: int) -> float:
        """What multiplies each group's own rate once batch `iteration` is over."""
        if self.warmup_num_steps > 0:
            if iteration < 0:
                return 0.0
            if iteration < self.warmup_num_steps:
                return self.warmup_min_ratio + self._rise(iteration) * (1.0 - self.warmup_min_ratio)
        # The fall counts its first step as done, so it is over at index total - 1, with the last batch of the run.
        done = (iteration - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        fall = (1.0 + math.cos(math.pi * min(1.0, done))) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * fall)


def _positive(schedule: object, name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{type(schedule).__name__}: {name} must be an integer of 1 or more, got {value!r}")
    return value


SCHEDULES: Mapping[str, type[LRScheduler]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "Cosine": WarmupCosineLR,
}
"""The names that a config may use, `Cosine` an alias."""

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
"""Those of torch whose arguments JSON can hold and whose `step` needs none (ReduceLROnPlateau wants a metric)."""

NOT_BUILT_YET = ("LRRangeTest", "OneCycle")


def build_scheduler(optimizer: Optimizer, type: str, params: Mapping[str, Any]) -> LRScheduler:
    """The scheduler that `scheduler.type` and `scheduler.params` of a config name, over `optimizer`.

    Raises:
        ConfigError: an unknown name or argument (with the nearest known one), a missing one, or a value that can't be.
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
    try:
        return cls(optimizer, **params)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"scheduler.params: {error}") from error


def _schedule_class(name: str) -> type[LRScheduler]:
    if name in SCHEDULES:
        return SCHEDULES[name]
    if name in TORCH_SCHEDULES:
        return getattr(lr_scheduler, name)
    if name in NOT_BUILT_YET:
        raise ConfigError(f"scheduler.type: {name} is not built yet; use one of {', '.join(SCHEDULES)}")
    known = [*SCHEDULES, *TORCH_SCHEDULES]
    raise ConfigError(
        f"scheduler.type: no scheduler {name!r}; {_nearest(name, known)}. "
        "Any other torch scheduler can be made in the script and given as lr_scheduler"
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
