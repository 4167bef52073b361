"""A running mean of a noisy curve that does not lag at the start.

An exponential mean divided by the weight it has gathered so far, as Adam corrects its moments: the plain one clings to
the first value, and a loss that falls fast then looks higher than it is.
"""

from __future__ import annotations

KEEP = 0.9


class Smooth:
    """Add values one by one; `value` is their smoothed mean."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        self._sum = KEEP * self._sum + (1 - KEEP) * value
        self._weight = KEEP * self._weight + (1 - KEEP)
        return self.value

    @property
    def value(self) -> float:
        return self._sum / self._weight
