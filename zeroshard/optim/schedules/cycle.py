"""OneCycle (Smith, arXiv:1803.09820) and LRRangeTest (Smith, arXiv:1506.01186, section 3.3) with DeepSpeed's values.

With `k = i + 1` batches done, OneCycle rises for `first` batches, falls for `second`, and then decays:

    rate       min --------> max --------> min --- min / (1 + decay_lr_rate * d) -->
    momentum   max --------> min --------> max --- max * (1 + decay_mom_rate * d) -->
               0            first     first + second             d = (k - first - second) / decay_step_size

With stairs, a rise or fall has that many equal steps; each is taken when the line would have reached its height. Three
properties of DeepSpeed 0.19.8 are kept: before the first batch the momentum is cycle_min_mom (after it, near
cycle_max_mom); beta2 becomes 0.99; decay_step_size 0 means no decay of rate or momentum. Positions are whole batches;
fractions in floating point would take some steps a batch too late.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from zeroshard.errors import UsageError, ZeroShardWarning
from zeroshard.optim.schedules.base import IndexedSchedule, per_group, whole_number

BETA2 = 0.99
"""What beta2 becomes where OneCycle cycles the momentum of an Adam."""


class LRRangeTest(IndexedSchedule):
    """Raises the rate linearly from its minimum, without end, to find the rate at which training diverges.

    After k batches the rate is `min * (1 + step_rate * k / step_size)`; a staircase rounds k / step_size down.

    Args:
        lr_range_test_min_lr: one rate, or one for each group of the optimizer.
        lr_range_test_step_size: batches in which the rate grows by `step_rate` times the minimum.
        lr_range_test_step_rate: how fast it grows; 0 keeps the minimum.
        lr_range_test_staircase: grow once per `step_size` batches instead of at each batch.

    Raises:
        UsageError: a list whose length is not the number of groups, or a value out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        self.min_lrs = per_group(self, optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = whole_number(self, "lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = _at_least_0(self, "lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates_at(self, iteration: int) -> list[float]:
        done = iteration + 1
        interval = done // self.step_size if self.staircase else done / self.step_size
        return [low * (1.0 + self.step_rate * interval) for low in self.min_lrs]


class OneCycle(IndexedSchedule):
    """One rise and fall of the rate, with the inverse for the momentum, then a decay.

    Args:
        cycle_min_lr, cycle_max_lr: one rate, or one for each group of the optimizer.
        decay_lr_rate: after the cycle the rate is min / (1 + decay_lr_rate * batches / decay_step_size).
        cycle_first_step_size: batches of the rise.
        cycle_second_step_size: batches of the fall; None: as many as the rise, 0: no fall, the minimum follows at once.
        cycle_first_stair_count: number of equal steps of the rise; 0 is a line.
        cycle_second_stair_count: the same for the fall; None: as many as the rise.
        decay_step_size: batches per unit of decay; 0 is no decay.
        cycle_momentum: cycle the first beta of each group (the second becomes 0.99), or its momentum.
        cycle_min_mom, cycle_max_mom: bounds of the momentum, in [0, 1): one number, or one for each optimizer group.
        decay_mom_rate: after the cycle the momentum is max * (1 + decay_mom_rate * batches / decay_step_size).

    Raises:
        UsageError: a list whose length is not the number of groups; a value out of range; from `step`, a decay
            that has taken the momentum out of [0, 1).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.min_lrs = per_group(self, optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = per_group(self, optimizer, "cycle_max_lr", cycle_max_lr)
        self.first = whole_number(self, "cycle_first_step_size", cycle_first_step_size)
        self.second = whole_number(self, "cycle_second_step_size", second, 0)
        self.first_stairs = whole_number(self, "cycle_first_stair_count", cycle_first_stair_count, 0)
        self.second_stairs = whole_number(self, "cycle_second_stair_count", second_stairs, 0)
        self.decay_step_size = whole_number(self, "decay_step_size", decay_step_size, 0)
        self.decay_lr_rate = _at_least_0(self, "decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = decay_mom_rate
        self.min_moms = per_group(self, optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = per_group(self, optimizer, "cycle_max_mom", cycle_max_mom)
        self._cycles = _momentum_keys(optimizer) if cycle_momentum else []
        if cycle_momentum:
            self._check_momentum()
        super().__init__(optimizer, last_batch_iteration)

    @property
    def step_ratio(self) -> float:
        """The share of the rise in the cycle's batches."""
        return self.first / (self.first + self.second)

    def rates_at(self, iteration: int) -> list[float]:
        height = self.height_at(iteration)
        decay = 1.0 + self.decay_lr_rate * self._decay_units(iteration)
        return [(low + (high - low) * height) / decay for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def momenta_at(self, iteration: int) -> list[float]:
        """The momentum of each group (of Adam, the first beta) after batch `iteration`, as the cycle has it."""
        height, decay = self.height_at(iteration), 1.0 + self.decay_mom_rate * self._decay_units(iteration)
        return [high * decay - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def get_mom(self) -> list[tuple[float, float] | float | None] | None:
        """The cycle's betas or momentum of each group, or None for a group with neither; None if none is cycled.

        Before the first batch this is cycle_max_mom, as in DeepSpeed, while the groups have cycle_min_mom.
        """
        return self._as_groups(self.momenta_at(self.last_batch_iteration)) if any(self._cycles) else None

    def _as_groups(self, momenta: Sequence[float]) -> list[tuple[float, float] | float | None]:
        return [
            (momentum, BETA2) if key == "betas" else momentum if key is not None else None
            for momentum, key in zip(momenta, self._cycles, strict=True)
        ]

    def height_at(self, iteration: int) -> float:
        """The height of the cycle after batch `iteration`: 0 at the minimum rate, 1 at the maximum."""
        done = iteration + 1
        if done >= self.first + self.second:
            return 0.0
        if done <= self.first:
            return _part_climbed(done, self.first, self.first_stairs)
        return _part_climbed(self.first + self.second - done, self.second, self.second_stairs)

    def step(self, epoch: int | None = None) -> None:
        """Go to the next batch, or to the batch index `epoch`."""
        super().step(epoch)
        self._set_momentum()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the index, and set the groups' rates and momentum from it, by the arguments of this object."""
        super().load_state_dict(state_dict)
        self._set_momentum()

    def _decay_units(self, iteration: int) -> float:
        after = iteration + 1 - self.first - self.second
        return after / self.decay_step_size if self.decay_step_size and after > 0 else 0.0

    def _set_momentum(self) -> None:
        if not any(self._cycles):
            return
        at = self.last_batch_iteration
        momenta = self.min_moms if at < 0 else self.momenta_at(at)
        for value in momenta:
            if not 0.0 <= value < 1.0:
                raise UsageError(
                    f"OneCycle: decay_mom_rate {self.decay_mom_rate} has moved the momentum to {value:g} after "
                    f"{at + 1} batches, but it must be below 1; set decay_mom_rate to 0, or a smaller number"
                )
        for group, key, value in zip(self.optimizer.param_groups, self._cycles, self._as_groups(momenta), strict=True):
            if key is not None:
                group[key] = value

    def _check_momentum(self) -> None:
        for name, values in (("cycle_min_mom", self.min_moms), ("cycle_max_mom", self.max_moms)):
            for value in values:
                if not 0.0 <= value < 1.0:
                    raise UsageError(f"OneCycle: {name} {value!r} must be at least 0 and below 1")
        if not any(self._cycles):
            _warn("cycle_momentum has no effect: the optimizer has neither betas nor a momentum above 0")
        elif "momentum" in self._cycles:
            _warn("momentum without betas is cycled; DeepSpeed leaves it alone: set cycle_momentum to false for that")
        highest = max(self.max_moms)
        if self.decay_step_size and self.decay_mom_rate > 0 and highest > 0:
            steps = (1.0 / highest - 1.0) / self.decay_mom_rate * self.decay_step_size
            _warn(
                f"decay_mom_rate {self.decay_mom_rate} makes the momentum grow to 1 after about "
                f"{self.first + self.second + int(steps)} batches, where the run would end with an error"
            )


def _part_climbed(done: int, size: int, stairs: int) -> float:
    """The height after `done` of the `size` batches of a rise; with stairs, that of the last one reached."""
    return done * stairs // size / stairs if stairs else done / size


def _momentum_keys(optimizer: Optimizer) -> list[str | None]:
    """For each group the key of its momentum, "betas" or "momentum"; None if there is none to cycle."""
    return [
        "betas" if "betas" in group else "momentum" if group.get("momentum") else None
        for group in optimizer.param_groups
    ]


def _at_least_0(schedule: object, name: str, value: float) -> float:
    if not value >= 0.0:
        raise UsageError(f"{type(schedule).__name__}: {name} must be a number of 0 or more, got {value!r}")
    return value


def _warn(message: str) -> None:
    warnings.warn(f"OneCycle: {message}", ZeroShardWarning, stacklevel=4)
