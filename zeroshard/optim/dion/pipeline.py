"""Sums factors over the ranks that divide matrices, part by part, while other parts are computed.

    turn       0          1          2          3          4
    start      part 0     part 1     part 2     part 3     part 4
    project               part 0     part 1     part 2     part 3
    correct                          part 0     part 1     part 2
    finish                                      part 0     part 1

`start`, `project` and `correct` each write a buffer, whose sum over the ranks is issued at once and waited for when the
part's next one begins, a turn later. The plan divides the matrices into parts (`plan.factors`), so every rank knows all
sizes. There are four buffers: after `finish` of a part its buffer is that of the part four later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.optim.beside import BesideCompute, Sent
from zeroshard.plan.factors import FACTORS, IN_FLIGHT, Factors, buffer_nbytes, factor_parts, part_nbytes

Place = tuple[int, int, int]
"""A region, a segment of its layout, and the first matrix of a stack of matrices of that parameter."""


@dataclass(frozen=True)
class FactorBuffers:
    """The buffers of a stack of matrices.

    Attributes:
        right: float32 (batch, rank, columns), the right factors.
        left: float64 (batch, rows, rank), the left factors.
        following: float64 (batch, rank, columns), the next right factors, before their columns are scaled.
    """

    right: torch.Tensor
    left: torch.Tensor
    following: torch.Tensor


class FactorWork(Protocol):
    """What a rank computes; each buffer is zeros before it is written, and summed over the ranks afterwards."""

    def start(self, place: Place, factors: FactorBuffers) -> None:
        """Add gradients to the momentum, and write this rank's elements of `right`."""
        ...

    def project(self, place: Place, factors: FactorBuffers) -> None:
        """Write the products of this rank's rows and `right` to `left`."""
        ...

    def correct(self, place: Place, factors: FactorBuffers) -> None:
        """Make `left` orthonormal, and write the products of this rank's rows and it to `following`."""
        ...

    def finish(self, place: Place, factors: FactorBuffers) -> None:
        """Update the matrices and their state."""
        ...


@dataclass
class _Part:
    """Some matrices, and what of them is on its way.

    Attributes:
        places: the matrices.
        sums: the whole buffers of right, left and next right factors, one after the other in one allocation.
        factors: the buffers of each matrix.
        sent: the sum that was issued last and not waited for.
    """

    places: list[Place]
    sums: tuple[torch.Tensor, ...] = ()
    factors: tuple[FactorBuffers, ...] = ()
    sent: Sent | None = None


class FactorPipeline:
    """The sums over one mesh axis.

    Args:
        members: the matrices, in plan order, and the sizes of their factors; equal on all ranks.
        peers: the communicator of the axis.
    """

    def __init__(
        self, members: Sequence[tuple[Place, Factors]], work: FactorWork, peers: Collectives, device: torch.device
    ) -> None:
        self._sizes, self._work = dict(members), work
        self._peers, self._device = peers, device
        self._beside = BesideCompute(peers, device)
        sizes = [each for _, each in members]
        self._places = [[place for place, _ in members[part.start : part.stop]] for part in factor_parts(sizes)]
        self.buffer_nbytes = buffer_nbytes(sizes)
        self._last_part = {number: part for part, places in enumerate(self._places) for number, *_ in places}
        self._parts: list[_Part] = []
        self._buffers: list[torch.Tensor] = []
        self._turn = 0

    def begin(self) -> None:
        """Allocate the buffers, and start with the first part."""
        count = min(len(self._places), IN_FLIGHT)
        nbytes = self.buffer_nbytes // count
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(count)]
        self._parts = [_Part(places) for places in self._places]
        self._turn = 0
        self._take_turn()

    def finish(self, number: int) -> None:
        """Update a region, and all of the parts before it. Called in the same order on all ranks."""
        while self._turn - (IN_FLIGHT - 1) <= self._last_part[number]:
            self._take_turn()
        if self._turn == len(self._parts) + IN_FLIGHT - 1:
            self._buffers, self._parts = [], []

    def _take_turn(self) -> None:
        work, turn = self._work, self._turn
        self._turn += 1
        if turn < len(self._parts):
            self._place(turn)
        for step, does in enumerate((work.start, work.project, work.correct, work.finish)):
            if not 0 <= turn - step < len(self._parts):
                continue
            part = self._parts[turn - step]
            self._arrive(part)
            for place, factors in zip(part.places, part.factors, strict=True):
                does(place, factors)
            if step < len(part.sums):
                self._send(part, part.sums[step])
            else:
                part.sums = part.factors = ()

    def _place(self, index: int) -> None:
        """Give a part its buffer, filled with zeros."""
        part, buffer = self._parts[index], self._buffers[index % len(self._buffers)]
        sizes = [self._sizes[place] for place in part.places]
        rights, lefts, followings = part_nbytes(sizes)
        buffer[: rights + lefts + followings].zero_()
        # Those of 8-byte elements first.
        left, following, right = buffer[: lefts + followings + rights].split([lefts, followings, rights])
        part.sums = right.view(torch.float32), left.view(torch.float64), following.view(torch.float64)
        pieces = [
            part.sums[0].split([each.right_numel for each in sizes]),
            part.sums[1].split([each.left_numel for each in sizes]),
            part.sums[2].split([each.right_numel for each in sizes]),
        ]
        part.factors = tuple(
            FactorBuffers(
                right.view(each.batch, each.rank, each.columns),
                left.view(each.batch, each.rows, each.rank),
                following.view(each.batch, each.rank, each.columns),
            )
            for each, right, left, following in zip(sizes, *pieces, strict=True)
        )

    def _send(self, part: _Part, total: torch.Tensor) -> None:
        if total.numel():
            part.sent = self._beside.send(lambda: self._peers.all_reduce(total, FACTORS))

    def _arrive(self, part: _Part) -> None:
        """Make what was sent last of a part usable."""
        if part.sent is not None:
            self._beside.arrive(part.sent)
            part.sent = None
