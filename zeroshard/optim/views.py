"""Optimizer state by parameter: what `safe_get_*_optimizer_state` and its setters read and write.

A base class and not a part of `StatefulUpdate`: an update whose state is not element-wise (blocks of 8-bit moments,
say) has nothing to show per element, and then says so by not being one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class StateViews(ABC):
    """An update whose state has one value for each element of a parameter."""

    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors, as far as there are any yet."""

    @abstractmethod
    def state_view(self, region: int, index: int, name: str) -> torch.Tensor | None:
        """This rank's elements of one state of parameter `index` of region number `region`.

        Returns:
            A flat view that may be written; empty where this rank updates no element of the parameter; None while the
            parameter has no such state (it is not the optimizer's, or has not been updated yet).
        """
