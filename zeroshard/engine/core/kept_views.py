"""Warns of views of gathered parameters that modules keep beyond the forward in which they were taken.

    forward    self.old = self.weight.detach()      a view of the slot that the unit was gathered into
    later      another unit is gathered there       self.old shows that one's values, and torch knows nothing of it

Autograd keeps such views too, rightly: a unit comes back to its slot before the backward reads them. So a view is no
fault by itself, and code that takes it anew in each forward reads right values. The first passes, and some later ones,
look at what modules have among their attributes, and say which of it will show other values. Rejected: looking for
views in all objects of the process, which takes longer than a step and finds the engine's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from zeroshard.errors import ZeroShardWarning
from zeroshard.sharding.overlap import kept_tensors


class KeptViews:
    """Looks at the attributes of a model's modules between two passes.

    Args:
        slots: the memory that units are gathered into, one after the other.
    """

    def __init__(self, model: nn.Module, slots: Sequence[torch.Tensor]) -> None:
        self._model = model
        self._told: set[str] = set()
        self.adopt(slots)

    def adopt(self, slots: Sequence[torch.Tensor]) -> None:
        """The slots are others from here on."""
        self._slots = [(slot.data_ptr(), slot.data_ptr() + slot.nbytes) for slot in slots if slot.nbytes]

    def look(self) -> None:
        """Warn of each view once."""
        for member in kept_tensors(self._model) if self._slots else ():
            if member.name in self._told or not any(low <= member.span.start < high for low, high in self._slots):
                continue
            self._told.add(member.name)
            warnings.warn(
                f"{member.name!r} is a view of parameters that were gathered for a forward, kept beyond it. Their "
                "memory serves other parameters by then, whose values it will show. Read it in the same forward alone, "
                "or keep a copy (weight.detach().clone())",
                ZeroShardWarning,
                stacklevel=2,
            )
