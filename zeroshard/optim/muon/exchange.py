"""Brings sharded matrices together at their owners, and takes the results back to where they belong.

    sent      [ for rank 0: my pieces of its matrices | for rank 1: ... ]
                            |  ^
                 all-to-all v  | all-to-all
    received  [ from rank 0: its pieces of my matrices | from rank 1: ... ]

The same two buffers serve both ways. Who owns what is in the plan (`plan.matrices`), so every rank knows all sizes and
nothing is negotiated. Bytes travel, not numbers: backends don't all know bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.optim.regions import Region
from zeroshard.plan.matrices import MATRICES

WIRE = torch.bfloat16


@dataclass(frozen=True)
class _Place:
    """One piece: which segment of which region, its elements within the segment, and where it lies in a buffer."""

    number: int
    index: int
    low: int
    high: int
    start: int

    @property
    def cut(self) -> slice:
        return slice(self.start, self.start + self.high - self.low)


class MatrixExchange:
    """The exchange over one mesh axis.

    Args:
        regions: this rank's regions by number, all divided over the axis and with owners.
        unit: what the operation log calls it.
    """

    def __init__(self, regions: Sequence[tuple[int, Region]], peers: Collectives, device: torch.device) -> None:
        self._regions = dict(regions)
        self._peers = peers
        self._device = device
        sent = [self._between(peers.rank, owner) for owner in range(peers.size)]
        received = [self._between(rank, peers.rank) for rank in range(peers.size)]
        self._in_splits = [sum(high - low for *_, low, high in pieces) for pieces in sent]
        self._out_splits = [sum(high - low for *_, low, high in pieces) for pieces in received]
        self._mine = _placed(sent)
        self._theirs = _placed(received)
        self._sent: torch.Tensor | None = None
        total = sum(segment.numel for _, region in regions for segment in region.layout.segments)
        self._nbytes = -(-total * WIRE.itemsize // peers.size)

    def _between(self, rank: int, owner: int) -> list[tuple[int, int, int, int]]:
        """What `rank` has of the matrices of `owner`: (region, segment, first and last element of the segment)."""
        found: list[tuple[int, int, int, int]] = []
        for number, region in self._regions.items():
            start, end = region.layout.shard_range(rank)
            for index, low, high in region.layout.pieces(start, end):
                if region.owners[index] == owner:
                    offset = region.layout.segments[index].offset - start
                    found.append((number, index, low - offset, high - offset))
        return found

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of both buffers on this rank while an exchange runs."""
        return (sum(self._in_splits) + sum(self._out_splits)) * WIRE.itemsize

    def begin(self) -> None:
        """Take the buffer for this rank's pieces."""
        self._sent = torch.empty(sum(self._in_splits), dtype=WIRE, device=self._device)

    def piece(self, number: int, index: int) -> torch.Tensor:
        """Where this rank's piece of a matrix lies: to be filled before `run`, and made orthogonal after it."""
        assert self._sent is not None
        return self._sent[self._mine[number, index][0].cut]

    def run(self, work: Callable[[int, int, torch.Tensor], torch.Tensor]) -> None:
        """Bring the matrices together, let `work` turn each that this rank owns, and take the results back.

        Args:
            work: (region, segment, matrix as a flat bfloat16 tensor) to a tensor of as many elements.
        """
        assert self._sent is not None
        received = torch.empty(sum(self._out_splits), dtype=WIRE, device=self._device)
        self._send(received, self._sent, self._out_splits, self._in_splits)
        for (number, index), places in self._theirs.items():
            # Pieces follow each other in the matrix as the ranks that hold them do.
            whole = torch.cat([received[place.cut] for place in places])
            done = work(number, index, whole).reshape(-1)
            for place in places:
                received[place.cut].copy_(done[place.low : place.high])
        self._send(self._sent, received, self._in_splits, self._out_splits)

    def end(self) -> None:
        """Give the buffer back."""
        self._sent = None

    def _send(self, out: torch.Tensor, data: torch.Tensor, out_splits: list[int], in_splits: list[int]) -> None:
        width = WIRE.itemsize
        pending = self._peers.all_to_all(
            out.view(torch.uint8),
            data.view(torch.uint8),
            [count * width for count in out_splits],
            [count * width for count in in_splits],
            MATRICES,
            self._nbytes,
        )
        self._peers.wait(pending)


def _placed(per_rank: Sequence[Sequence[tuple[int, int, int, int]]]) -> dict[tuple[int, int], list[_Place]]:
    """Pieces one after the other in a buffer, by the matrix that they belong to."""
    found: dict[tuple[int, int], list[_Place]] = {}
    start = 0
    for pieces in per_rank:
        for number, index, low, high in pieces:
            found.setdefault((number, index), []).append(_Place(number, index, low, high, start))
            start += high - low
    return found
