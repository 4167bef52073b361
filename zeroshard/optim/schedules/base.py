"""Base of zeroshard's schedules: a torch `LRScheduler` whose rates are a pure function of the last batch's index.

Trainers check for torch's class. The index is `i = last_epoch - 1`: -1 before the first batch and 0 after the first
optimizer step. The state is the index alone, as in DeepSpeed, so each can load the other's. Rejected: `LambdaLR`, which
multiplies the initial rate of a group, while most of these schedules have two absolute rates, and whose state would
contain closures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zeroshard.errors import UsageError


class IndexedSchedule(LRScheduler, ABC):
    """A schedule whose rates are a pure function of the index of the last batch.

    Args:
        optimizer: its groups' rates are set here and at each `step`.
        last_batch_iteration: -1 for a new run; to continue after batch `n` pass `n`, or load a state.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1):
        for group in optimizer.param_groups:
            rate = group["lr"]
            group.setdefault("initial_lr", rate.clone() if isinstance(rate, torch.Tensor) else rate)
        # torch takes one step in the constructor, which goes to index `last_batch_iteration`.
        super().__init__(optimizer, last_epoch=last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        return self.last_epoch - 1

    @abstractmethod
    def rates_at(self, iteration: int) -> list[float]:
        """The rate of each group after batch `iteration`; -1 is the start."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [*self.rates_at(self.last_batch_iteration)]

    def step(self, epoch: int | None = None) -> None:
        """Go to the next batch, or to the batch index `epoch` (the argument has torch's name)."""
        if epoch is not None:
            self.last_epoch = epoch  # the step below adds the one by which the two counts differ
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the index, and set the groups' rates from it, by the arguments of this object, not of the saved one.

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


def per_group(schedule: object, optimizer: Optimizer, name: str, value: float | Sequence[float]) -> list[float]:
    """One value for each group from one number or a list. Raises UsageError for anything else."""
    groups = optimizer.param_groups
    if isinstance(value, (int, float)):
        return [float(value)] * len(groups)
    numbers = isinstance(value, Sequence) and all(isinstance(item, (int, float)) for item in value)
    if not numbers:
        raise UsageError(f"{type(schedule).__name__}: {name} must be a number or a list of numbers, got {value!r}")
    if len(value) != len(groups):
        raise UsageError(
            f"{type(schedule).__name__}: {name} has {len(value)} values but the optimizer has {len(groups)} groups; "
            "give one number, or one for each group"
        )
    return [float(item) for item in value]


def whole_number(schedule: object, name: str, value: int, low: int = 1) -> int:
    """Return `value`. Raises UsageError unless it is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UsageError(f"{type(schedule).__name__}: {name} must be an integer of {low} or more, got {value!r}")
    return value
