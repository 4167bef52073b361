"""Decides what the next backward does with its gradients: whether they are reduced, and the factor they are scaled by.

Callers set it before a backward begins (no_sync, accumulation boundaries, 1-bit optimizers, a loss that was divided
already), and the backward reads it when a unit's gradients are complete. Rejected: arguments of the backward, since
`loss.backward()` takes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Decision(NamedTuple):
    """Whether whole gradients and sharded gradients are reduced when they are complete."""

    whole: bool
    sharded: bool


class ReducePolicy:
    """The rules for the next backward.

    Attributes:
        factor: multiplies the gradients of the running backward.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._no_sync = False
        self._boundary: bool | None = None
        self._keeps_local: Callable[[], bool] = lambda: False
        self._rule: Callable[[], float] = lambda: 1.0

    def begin_backward(self, collects: bool) -> None:
        """A backward begins; it may be refused.

        Args:
            collects: whether it leaves gradients on parameters (`torch.autograd.grad` does not).
        """
        self.factor = self._rule() if collects else 1.0

    def decide(self, accumulate: bool) -> Decision:
        """Which gradients to reduce when they are complete.

        Args:
            accumulate: whether the plan has accumulators for several micro-batches.
        """
        whole = self._boundary if self._boundary is not None else not accumulate
        local = self._boundary is False and not accumulate  # it has no accumulators
        reduce = not (self._no_sync or self.keeps_local or local)
        return Decision(whole and reduce, reduce)

    @property
    def keeps_local(self) -> bool:
        """Whether gradients are not reduced at all, not even by the step."""
        return self._keeps_local()

    @property
    def in_no_sync(self) -> bool:
        """Whether `no_sync` is open."""
        return self._no_sync

    def keep_local_while(self, condition: Callable[[], bool]) -> None:
        """Reduce no gradients while `condition()` is true: the optimizer averages itself. It is equal on all ranks."""
        self._keeps_local = condition

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate locally; the next one outside, or the step, reduces."""
        previous, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = previous

    def set_boundary(self, boundary: bool | None) -> None:
        """Say whether the next backward is the last one before the step; with None whole gradients wait for the step.
        Say whether the next backward is the last one before the step; with None whole gradients wait for the step."""
        self._boundary = boundary

    def before_each_backward(self, rule: Callable[[], float]) -> None:
        """Call `rule` when a backward that collects gradients begins; it returns their factor, or refuses."""
        self._rule = rule
