"""Sums the squares of reduced gradients during the backward, for the norm of the step.

gradients on the device    each group after its last reduce before the step; added to the norm of the step
gradients in host memory   each group before its reduced part is copied to the host; one sum per group
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from zeroshard.engine.core.streams import Streams
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.unit import Unit
from zeroshard.engine.memory.update_view import own_grad, own_pieces
from zeroshard.optim.kernels.norm import SquaredNorm
from zeroshard.plan.legs import Stream


@dataclass(frozen=True)
class HostSquares:
    """The sum of squares of gradients that go to host memory."""

    norm: SquaredNorm
    total: torch.Tensor


class Squares:
    """The squares of all groups, and which groups have been squared already."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._done: set[int] = set()
        self.square_into(None, ())

    def adopt(self, units: Iterable[Unit], *, accumulate: bool) -> None:
        """Start anew under a plan."""
        self._final = not accumulate
        # Allocated here, on compute, which every reduce waits for. Later, zeroing them could come after the first sum.
        self._on_host = {
            id(group): _squares_of(group)
            for unit in units
            for group in unit.trainable
            if group.plan.grad_off_device and group.staging is not None
        }

    def clear(self) -> None:
        """The gradients were dropped."""
        self._done = set()

    def square_into(self, norm: SquaredNorm | None, groups: Sequence[Group]) -> None:
        """Square each group after its reduce, as the tensor of `norm` with the same number; with None square nothing.
        Square each group after its reduce, as the tensor of `norm` with the same number; with None square nothing."""
        self._norm = norm
        self._number = {id(group): number for number, group in enumerate(groups)}
        self._done = set()

    def square_rest(self, groups: Sequence[Group]) -> None:
        """Square the groups on compute that were not squared after their reduce."""
        assert self._norm is not None
        for number, group in enumerate(groups):
            if id(group) not in self._done:
                self._norm.square(number, own_grad(group))

    def after_reduce(self, unit: Unit, group: Group) -> None:
        """Square a group whose reduce was the last one before the step."""
        norm, number = self._norm, self._number.get(id(group))
        if norm is None or number is None or not self._final or id(group) in self._done:
            return
        gradient = own_grad(group)
        self._streams.enqueue(Stream.REDUCE, lambda: norm.square(number, gradient), (("grad", unit.index),))
        self._done.add(id(group))

    def beside_sum(self, group: Group) -> torch.Tensor | None:
        """Where the kernel of a group's last sum writes the squares; None if they are not needed."""
        norm, number = self._norm, self._number.get(id(group))
        if norm is None or number is None or not self._final:
            return None
        self._done.add(id(group))
        return norm.partial(number)

    def changed(self, group: Group) -> None:
        """Resting gradients were changed while no reduce runs, so earlier squares are out of date."""
        self._done.discard(id(group))
        squares = self._on_host.get(id(group))
        if squares is not None:
            squares.norm.square(0, own_grad(group).to(squares.total.device))
            squares.norm.into(squares.total)

    def of(self, group: Group) -> HostSquares:
        """The squares of a group whose gradients go to host memory."""
        return self._on_host[id(group)]

    def total(self, group: Group) -> torch.Tensor:
        """Float64 scalar on the device: the sum of squares of a group's gradients in host memory."""
        return self.of(group).total

    def first_bad(self, group: Group) -> torch.Tensor:
        """Int64 scalar on the device: the first tile of such gradients that is not finite; see SquaredNorm."""
        return self.of(group).norm.first_bad

    def first_in_tile(self, group: Group, tile: int) -> int:
        """The first element of a tile of such gradients, in this rank's part."""
        return self.of(group).norm.place_of(tile)[1]


def _squares_of(group: Group) -> HostSquares:
    assert group.staging is not None
    device = group.staging.device
    norm = SquaredNorm([own_pieces(group)], device)
    return HostSquares(norm, torch.zeros((), dtype=torch.float64, device=device))
