"""Warm-up schedules: WarmupLR, WarmupDecayLR, WarmupCosineLR.

The values are exactly those of DeepSpeed 0.19.8, so that a run that is continued with zeroshard has the same rates.
With `i` the index of the last batch (-1 before the first, 0 after the first optimizer step) and
`w = max(2, warmup_num_steps)`:

    i = -1        the rate at construction: warmup_min_lr, or 0 for WarmupCosineLR (whatever warmup_min_ratio says)
    0 <= i < w    gamma = log(i + 1) / log(w)  or  i / w  (so the first two optimizer steps run at the minimum)
    w <= i        WarmupLR 1; WarmupDecayLR a line to 0 at i = total; WarmupCosineLR half a cosine, over at total - 1
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from zeroshard.errors import ZeroShardWarning
from zeroshard.optim.schedules.base import IndexedSchedule, per_group, whole_number

WARMUP_TYPES = ("log", "linear")


class _Warmup(IndexedSchedule):
    """Base of the three schedules: the length and form of the rise."""

    def __init__(self, optimizer: Optimizer, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int):
        whole_number(self, "warmup_num_steps", warmup_num_steps, 0)
        if warmup_type not in WARMUP_TYPES:
            warnings.warn(
                f"{type(self).__name__}: warmup_type {warmup_type!r} is neither 'log' nor 'linear'; using 'log'",
                ZeroShardWarning,
                stacklevel=3,
            )
            warmup_type = "log"
        # With one step the code would divide by log(1); with none (an error in DeepSpeed) the full rate holds at once.
        self.warmup_num_steps = max(2, warmup_num_steps) if warmup_num_steps else 0
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def _rise(self, iteration: int) -> float:
        """The height of the rise, 0 to 1, for 0 <= iteration < warmup_num_steps."""
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
        warmup_max_lr: the same; None: each group's own rate.
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
        if value is None:
            return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        return per_group(self, optimizer, name, value)

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
        warmup_max_lr: 0.001 by default, as in DeepSpeed; None: each group's own rate.
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
        self.total_num_steps = whole_number(self, "total_num_steps", total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self._warn_if_shorter(total_num_steps)

    def _after_warmup(self, iteration: int) -> float:
        left = self.total_num_steps - max(0, iteration)
        return max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Each group's own rate times a ratio: up from warmup_min_ratio to 1, then half a cosine down to cos_min_ratio.

    Args:
        total_num_steps: optimizer steps in the whole run; cos_min_ratio is reached at the last step and kept.
        warmup_min_ratio: the ratio at the start of the rise. Before the first batch the rate is 0, as in DeepSpeed.
        warmup_num_steps: 1 counts as 2; 0 is no warm-up.
        cos_min_ratio: the ratio at the end of the fall.
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
        self.total_num_steps = whole_number(self, "total_num_steps", total_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self._warn_if_shorter(total_num_steps)

    def rates_at(self, iteration: int) -> list[float]:
        ratio = self.ratio_at(iteration)
        return [float(base) * ratio for base in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """The present factor of each group's own rate."""
        return self.ratio_at(self.last_batch_iteration)

    def ratio_at(self, iteration: int) -> float:
        """The factor of each group's own rate after batch `iteration`."""
        if self.warmup_num_steps > 0:
            if iteration < 0:
                return 0.0
            if iteration < self.warmup_num_steps:
                return self.warmup_min_ratio + self._rise(iteration) * (1.0 - self.warmup_min_ratio)
        # The first step of the fall counts as done, so the fall ends at index total - 1, the last batch of the run.
        done = (iteration - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        fall = (1.0 + math.cos(math.pi * min(1.0, done))) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * fall)
