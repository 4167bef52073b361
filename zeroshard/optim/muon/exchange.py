"""Sends the pieces of sharded matrices to the matrices' owners, and the results back, part by part.

    sent      [ for rank 0: my pieces of its matrices | for rank 1: ... ]
                            |  ^
                 all-to-all v  | all-to-all
    received  [ from rank 0: its pieces of my matrices | from rank 1: ... ]

Both directions use the same two buffers, in which each part has its own place. The plan says which rank owns which
matrix and what a part is (`plan.matrices`), so every rank knows all sizes. While a rank works on its matrices of one
part, those of the next are on their way to it, and the results of the part before are on their way back. Buffers are
sent as bytes, since not all backends support bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zeroshard.comm.collectives import Collectives, Pending
from zeroshard.optim.beside import BesideCompute, Sent
from zeroshard.optim.regions import Region
from zeroshard.plan.matrices import MATRICES, exchange_parts, part_nbytes

WIRE = torch.bfloat16
Fill = Callable[[int], None]
"""Writes this rank's pieces of a region into the buffer."""
Work = Callable[[int, int, torch.Tensor], torch.Tensor]
"""(region, segment, matrix as a flat bfloat16 tensor) to a tensor of as many elements."""


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


@dataclass
class _Part:
    """A part of an exchange, and what of it is on its way.

    Attributes:
        regions: numbers of its regions.
        own_places, received_places: pieces in the two buffers, by (region, segment); those of a matrix that this rank
            owns are in the order of the ranks.
        in_splits, out_splits: elements for and from each rank.
        sent, received: its place in each buffer.
        nbytes: what a rank sends on average.
        on_its_way: the all-to-all that was issued last and not waited for.
    """

    regions: list[int]
    own_places: dict[tuple[int, int], list[_Place]]
    received_places: dict[tuple[int, int], list[_Place]]
    in_splits: list[int]
    out_splits: list[int]
    sent: slice
    received: slice
    nbytes: int
    on_its_way: Sent | None = None


class MatrixExchange:
    """The exchange over one mesh axis.

    Args:
        regions: this rank's regions with their numbers, all divided over the axis and with owners, in plan order.
        peers: the communicator of the axis.
    """

    def __init__(self, regions: Sequence[tuple[int, Region]], peers: Collectives, device: torch.device) -> None:
        self._regions = dict(regions)
        self._peers, self._device = peers, device
        self._beside = BesideCompute(peers, device)
        self._parts: list[_Part] = []
        self._numel_sent = self._numel_received = 0
        for part in exchange_parts([region.layout for _, region in regions]):
            self._add_part([number for number, _ in regions[part.start : part.stop]])
        self._part_of = {number: index for index, part in enumerate(self._parts) for number in part.regions}
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._fill: Fill | None = None
        self._work: Work | None = None
        self._worked = self._back = 0

    def _add_part(self, numbers: list[int]) -> None:
        peers = self._peers
        sent = [self._pieces_between(peers.rank, owner, numbers) for owner in range(peers.size)]
        received = [self._pieces_between(rank, peers.rank, numbers) for rank in range(peers.size)]
        in_splits = [sum(high - low for *_, low, high in pieces) for pieces in sent]
        out_splits = [sum(high - low for *_, low, high in pieces) for pieces in received]
        into, out_of = self._numel_sent, self._numel_received
        self._numel_sent += sum(in_splits)
        self._numel_received += sum(out_splits)
        self._parts.append(
            _Part(
                regions=numbers,
                own_places=_placed(sent, into),
                received_places=_placed(received, out_of),
                in_splits=in_splits,
                out_splits=out_splits,
                sent=slice(into, self._numel_sent),
                received=slice(out_of, self._numel_received),
                nbytes=part_nbytes([self._regions[number].layout for number in numbers]),
            )
        )

    def _pieces_between(self, rank: int, owner: int, numbers: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """The pieces that `rank` has of the matrices of `owner`: (region, segment, start, end within the segment)."""
        found: list[tuple[int, int, int, int]] = []
        for number in numbers:
            region = self._regions[number]
            start, end = region.layout.shard_range(rank)
            for index, low, high in region.layout.pieces(start, end):
                if region.owners[index] == owner:
                    offset = region.layout.segments[index].offset - start
                    found.append((number, index, low - offset, high - offset))
        return found

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of both buffers on this rank while an exchange runs."""
        return (self._numel_sent + self._numel_received) * WIRE.itemsize

    def begin(self, fill: Fill, work: Work) -> None:
        """Allocate the buffers and send the first part to the owners.

        Args:
            fill: called once for each region, in order; writes to each `piece`.
            work: called once for each matrix that this rank owns.
        """
        self._fill, self._work = fill, work
        self._worked = self._back = 0
        sent, received = (
            torch.empty(numel, dtype=WIRE, device=self._device) for numel in (self._numel_sent, self._numel_received)
        )
        self._buffers = (sent, received)
        self._send_to_owners(0)

    def piece(self, number: int, index: int) -> torch.Tensor:
        """This rank's piece of a matrix in the buffer, bfloat16: to be written by `fill`, the result after `finish`."""
        assert self._buffers is not None, "the exchange has not begun"
        return self._buffers[0][self._parts[self._part_of[number]].own_places[number, index][0].cut]

    def finish(self, number: int) -> None:
        """Make the results of a region's pieces usable. Called in the same order on all ranks."""
        wanted = self._part_of[number]
        # One part more is worked on first: the results of the wanted part are on their way back meanwhile.
        while self._worked < min(wanted + 2, len(self._parts)):
            self._work_on(self._worked)
            self._worked += 1
        while self._back <= wanted:
            self._arrive(self._parts[self._back])
            self._back += 1

    def end(self) -> None:
        """Free the buffers: all parts have come back."""
        assert self._back == len(self._parts), "a part is still on its way"
        self._buffers = self._fill = self._work = None

    def _send_to_owners(self, index: int) -> None:
        assert self._buffers is not None
        assert self._fill is not None
        part, (sent, received) = self._parts[index], self._buffers
        for number in part.regions:
            self._fill(number)
        self._send(part, received[part.received], sent[part.sent], part.out_splits, part.in_splits)

    def _work_on(self, index: int) -> None:
        """Work on a part's matrices, with the next part on its way here, and send the results back."""
        assert self._buffers is not None
        assert self._work is not None
        part, (sent, received) = self._parts[index], self._buffers
        if index + 1 < len(self._parts):
            self._send_to_owners(index + 1)
        self._arrive(part)
        for (number, segment), places in part.received_places.items():
            # Pieces are in the matrix in the order of the ranks that have them.
            whole = torch.cat([received[place.cut] for place in places])
            done = self._work(number, segment, whole).reshape(-1)
            for place in places:
                received[place.cut].copy_(done[place.low : place.high])
        self._send(part, sent[part.sent], received[part.received], part.in_splits, part.out_splits)

    def _send(
        self, part: _Part, out: torch.Tensor, data: torch.Tensor, out_splits: list[int], in_splits: list[int]
    ) -> None:
        part.on_its_way = self._beside.send(lambda: self._issue(part, out, data, out_splits, in_splits))

    def _issue(
        self, part: _Part, out: torch.Tensor, data: torch.Tensor, out_splits: list[int], in_splits: list[int]
    ) -> Pending:
        width = WIRE.itemsize
        return self._peers.all_to_all(
            out.view(torch.uint8),
            data.view(torch.uint8),
            [count * width for count in out_splits],
            [count * width for count in in_splits],
            MATRICES,
            part.nbytes,
        )

    def _arrive(self, part: _Part) -> None:
        """Make what was sent last of a part usable."""
        assert part.on_its_way is not None
        self._beside.arrive(part.on_its_way)
        part.on_its_way = None


def _placed(per_rank: Sequence[Sequence[tuple[int, int, int, int]]], start: int) -> dict[tuple[int, int], list[_Place]]:
    """Place the pieces of all ranks one after the other in a buffer, from `start` on, by (region, segment)."""
    found: dict[tuple[int, int], list[_Place]] = {}
    for pieces in per_rank:
        for number, index, low, high in pieces:
            found.setdefault((number, index), []).append(_Place(number, index, low, high, start))
            start += high - low
    return found
