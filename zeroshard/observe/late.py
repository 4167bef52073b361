"""A number that may lie on the device, read by the host when it has arrived and never waited for.

On a GPU it is copied into pinned memory behind whatever computes it, and an event says when it is there. `DelayedReads`
of the engine reads at a fixed pass instead, for decisions that all ranks take alike; nobody decides by a value here.
"""

from __future__ import annotations

from typing import Any

import torch


class LateNumber:
    """One number."""

    def __init__(self, value: Any) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._value = value
        if isinstance(value, torch.Tensor):
            value = value.detach()
            if value.is_cuda:
                self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                self._value.copy_(value, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record()
            else:
                self._value = value.clone()

    @property
    def arrived(self) -> bool:
        return self._arrived is None or self._arrived.query()

    def read(self) -> float:
        """The number, which has arrived."""
        return float(self._value)
