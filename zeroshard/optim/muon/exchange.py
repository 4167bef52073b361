"""Sends the pieces of sharded matrices to the matrices' owners, and the results back.

    sent      [ for rank 0: my pieces of its matrices | for rank 1: ... ]
                            |  ^
                 all-to-all v  | all-to-all
    received  [ from rank 0: its pieces of my matrices | from rank 1: ... ]

Both directions use the same two buffers. The plan says which rank owns which matrix (`plan.matrices`), so every rank
knows all sizes. Buffers are sent as bytes, since not all backends support bfloat16.
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
    """A piece of a matrix in a buffer.

    Attributes:
        number, index: the region, and the segment in its layout.
        low, high: the piece's elements within the segment.
        start: its first element in the buffer.
    """

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
        regions: this rank's regions with their numbers, all divided over the axis and with owners.
        peers: the communicator of the axis.
    """

    def __init__(self, regions: Sequence[tuple[int, Region]], peers: Collectives, device: torch.device) -> None:
        self._regions = dict(regions)
        self._peers = peers
        self._device = device
        sent = [self._pieces_between(peers.rank, owner) for owner in range(peers.size)]
        received = [self._pieces_between(rank, peers.rank) for rank in range(peers.size)]
        self._in_splits = [sum(high - low for *_, low, high in pieces) for pieces in sent]
        self._out_splits = [sum(high - low for *_, low, high in pieces) for pieces in received]
        self._own_places = _placed(sent)
        self._received_places = _placed(received)
        self._sent: torch.Tensor | None = None
        total = sum(segment.numel for _, region in regions for segment in region.layout.segments)
        self._nbytes = -(-total * WIRE.itemsize // peers.size)

    def _pieces_between(self, rank: int, owner: int) -> list[tuple[int, int, int, int]]:
        """The pieces that `rank` has of the matrices of `owner`: (region, segment, start, end within the segment)."""
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
        """Allocate the buffer for this rank's pieces."""
        self._sent = torch.empty(sum(self._in_splits), dtype=WIRE, device=self._device)

    def piece(self, number: int, index: int) -> torch.Tensor:
        """This rank's piece of a matrix in the buffer, bfloat16: to be written before `run`, the result after it."""
        assert self._sent is not None
        return self._sent[self._own_places[number, index][0].cut]

    def run(self, work: Callable[[int, int, torch.Tensor], torch.Tensor]) -> None:
        """Send the pieces to the owners, call `work` for each matrix that this rank owns, and send the results back.

        Args:
            work: (region, segment, matrix as a flat bfloat16 tensor) to a tensor of as many elements.
        """
        assert self._sent is not None
        received = torch.empty(sum(self._out_splits), dtype=WIRE, device=self._device)
        self._send(received, self._sent, self._out_splits, self._in_splits)
        for (number, index), places in self._received_places.items():
            # Pieces are in the matrix in the order of the ranks that have them.
            whole = torch.cat([received[place.cut] for place in places])
            done = work(number, index, whole).reshape(-1)
            for place in places:
                received[place.cut].copy_(done[place.low : place.high])
        self._send(self._sent, received, self._in_splits, self._out_splits)

    def end(self) -> None:
        """Free the buffer."""
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
    """Place the pieces of all ranks one after the other in a buffer; returns them by (region, segment)."""
    found: dict[tuple[int, int], list[_Place]] = {}
    start = 0
    for pieces in per_rank:
        for number, index, low, high in pieces:
            found.setdefault((number, index), []).append(_Place(number, index, low, high, start))
            start += high - low
    return found
