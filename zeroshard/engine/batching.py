"""The batch sizes of a run (step, micro-batch, accumulation steps), and the count of micro-batches within a step."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from zeroshard.errors import UsageError, ZeroShardWarning


@dataclass(frozen=True)
class BatchSizes:
    """train = micro * accumulation * data-parallel ranks, in samples."""

    train: int
    micro: int
    accumulation: int


class Batching:
    """Counts micro-batches to the boundary of each step. The sizes may change between steps.

    Attributes:
        sizes: the triple.
        since_step: micro-batches of the step that is being made.
        counts: whether micro-batches are counted; else every call of step is an update.
    """

    def __init__(self, sizes: BatchSizes, ranks: int, *, counts: bool = True) -> None:
        self.sizes = sizes
        self.counts = counts
        self.since_step = 0
        self._ranks = ranks
        self._manual: bool | None = None

    @property
    def at_boundary(self) -> bool:
        """Whether the coming (or running) micro-batch is the last before the update."""
        if self._manual is not None:
            return self._manual
        return self.counts and self.since_step + 1 >= self.sizes.accumulation

    @property
    def step_updates(self) -> bool:
        """Whether a call of step now makes an update."""
        return self.at_boundary or not self.counts

    @property
    def manual(self) -> bool:
        """Whether the user's calls decide which micro-batch is the last, instead of the count."""
        return self._manual is not None

    def decide(self, is_boundary: bool | None) -> None:
        """Set whether the coming micro-batch is the last one; None returns to counting. Raises UsageError otherwise."""
        if is_boundary is not None and not isinstance(is_boundary, bool):
            raise UsageError(
                f"set_gradient_accumulation_boundary({is_boundary!r}): True, False, or None to count again"
            )
        if not self.counts:
            raise UsageError(
                "set_gradient_accumulation_boundary() with managed_gradient_accumulation false: every step() is the "
                "boundary; leave out one of the two"
            )
        self._manual = is_boundary

    def count(self) -> bool:
        """Count a finished micro-batch; returns whether it was the last before the update."""
        boundary = self.step_updates
        self.since_step = 0 if boundary else self.since_step + 1
        return boundary

    def compare(self, before: int | None) -> None:
        """Warn if a run continues with another batch size than its checkpoint had."""
        if before not in (None, self.sizes.train):
            warnings.warn(
                f"the checkpoint was trained with {before} samples per step, this run takes {self.sizes.train}; with "
                "train_batch_size and train_micro_batch_size_per_gpu in the config, or elasticity, it stays the same",
                ZeroShardWarning,
                stacklevel=4,
            )

    def with_train(self, train: int) -> BatchSizes:
        """The triple for `train` samples per step, by another accumulation. Raises UsageError if it doesn't divide."""
        share = self.sizes.micro * self._ranks
        if _count("train_batch_size", train) % share:
            raise UsageError(
                f"train_batch_size {train} is no multiple of {share} (micro-batch {self.sizes.micro} x {self._ranks} "
                "ranks); choose one, or change the micro-batch first"
            )
        return replace(self.sizes, train=train, accumulation=train // share)

    def with_micro(self, micro: int) -> BatchSizes:
        """The triple for another micro-batch at the same accumulation."""
        train = _count("train_micro_batch_size", micro) * self.sizes.accumulation * self._ranks
        return replace(self.sizes, train=train, micro=micro)

    def with_accumulation(self, accumulation: int) -> BatchSizes:
        """The triple for another accumulation at the same micro-batch."""
        train = self.sizes.micro * _count("gradient_accumulation_steps", accumulation) * self._ranks
        return replace(self.sizes, train=train, accumulation=accumulation)


class AsksSizes:
    """Answers what DeepSpeed's scripts ask an engine about its batch."""

    _batching: Batching

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._batching.sizes.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch on one rank."""
        return self._batching.sizes.micro

    def train_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self._batching.sizes.train

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, samples of a micro-batch, micro-batches of a step."""
        sizes = self._batching.sizes
        return sizes.train, sizes.micro, sizes.accumulation


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value
