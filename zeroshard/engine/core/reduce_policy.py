"""What the next backward does with its gradients: whether they are reduced, and by what they are multiplied.

Told from outside before a backward begins (no_sync, accumulation boundaries, 1-bit optimizers, a loss that was divided
already), and read when a unit's gradients are complete. Rejected: arguments of the backward, for `loss.backward()` has
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Decision(NamedTuple):
    """Whether whole and sharded gradients are reduced when they are complete."""

    whole: bool
    sharded: bool


class ReducePolicy:
    """The rules of the next backward.

    Attributes:
        factor: what gradients of the backward that is running are multiplied by.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._no_sync = False
        self._boundary: bool | None = None
        self._keeps_local: Callable[[], bool] = lambda: False
        self._rule: Callable[[], float] = lambda: 1.0

    def begin_backward(self, collects: bool) -> None:
        """A backward begins; it `collects` gradients unless it gives its results to its caller. May refuse it."""
        self.factor = self._rule() if collects else 1.0

    def decide(self, accumulate: bool) -> Decision:
        """Of a plan that accumulates gradients of several micro-batches, or not."""
        whole = self._boundary if self._boundary is not None else not accumulate
        local = self._boundary is False and not accumulate  # it has no accumulators
        reduce = not (self._no_sync or self.keeps_local or local)
        return Decision(whole and reduce, reduce)

    @property
    def keeps_local(self) -> bool:
        """Whether gradients stay each rank's own, in the step too."""
        return self._keeps_local()

    @property
    def in_no_sync(self) -> bool:
        """Whether `no_sync` is open."""
        return self._no_sync

    def keep_local_while(self, condition: Callable[[], bool]) -> None:
        """Reduce no gradients while `condition()`, which is equal on all ranks: the optimizer averages by itself."""
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
        """Whether the next backward is the last before the step; None: not known, whole gradients wait for the step."""
        self._boundary = boundary

    def before_each_backward(self, rule: Callable[[], float]) -> None:
        """When a backward that gives gradients begins, ask `rule` by what to multiply these; it may refuse."""
        self._rule = rule
