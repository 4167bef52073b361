"""A flat group with parameters that the model itself divides (DTensors); the memory belongs to their local tensors.

    parameter     the DTensor: its class says whether it rests; autograd leaves gradients on it
    holder        its local tensor: a view of the slot in use, one expanded NaN at rest

Such a group may also have plain parameters, which are their own holders. Rejected: the same code in `Group`, which
would test for DTensors in each forward and backward of every model.
"""

from __future__ import annotations

import torch

from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.guard import consumed_gradient_of, sharded_gradient_of
from zeroshard.sharding.dtensors import as_dtensor, holder_of, local_gradient
from zeroshard.sharding.resting import expanded_nan, resting_class, unguarded


class DTensorGroup(Group):
    """The tensors of such a group on this rank."""

    def show(self) -> None:
        """See Group."""
        values = self.views if self._beside is None else self._beside
        for index, parameter in enumerate(self.parameters):
            if index not in self.opened:
                parameter.__class__ = self.classes[index]
                self.holders[index].data = values[index]

    def hide(self) -> None:
        """See Group."""
        for index, parameter in enumerate(self.parameters):
            if index not in self.opened:
                own = self.classes[index]
                parameter.__class__ = own
                self.holders[index].data = self.empties[index]
                parameter.__class__ = resting_class(own)  # pyright: ignore[reportAttributeAccessIssue]

    def find_holders(self) -> None:
        """See Group."""
        self.holders = [holder_of(parameter) for parameter in self.parameters]

    def gradients(self) -> list[torch.Tensor | None]:
        """See Group; partial sums are summed over the model's axis, so all its ranks call this together."""
        return [
            None if parameter.grad is None else local_gradient(parameter, parameter.grad)
            for parameter in self.parameters
        ]

    def consumed(self) -> torch.Tensor:
        """See Group."""
        with unguarded():
            shape = tuple(self.parameters[0].shape)
            return consumed_gradient_of(expanded_nan(shape, self.whole.dtype, self.device))

    def _placeholder(self, index: int) -> torch.Tensor:
        parameter = self.parameters[index]
        if as_dtensor(parameter) is None:
            return super()._placeholder(index)
        with unguarded():
            return sharded_gradient_of(expanded_nan(tuple(parameter.shape), self.whole.dtype, self.device))
