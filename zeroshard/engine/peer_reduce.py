"""Reduce-scatter by copies: gradients go from where autograd left them straight into the inboxes of their owners.

    p.grad --copy engine--> inbox of its owner, row of this rank --barrier--> owner sums its rows --> grad

Nothing is collected into a buffer first, so a gradient is moved once. Of two ranks the owner adds what came to its own
gradient where that lies, and its row stays empty. A gradient stays alive until it was sent, or added; that is checked
one unit later, when it has long happened. Memory and hazards:

    a gradient           belongs to the reduce stream until `done`; compute waits for that before giving it back
    a row of an inbox    is written by its rank until the barrier, then read by the owner's sum. The next copies into it
                         come after another barrier, which no rank reaches before its sum: that of the units between, or
                         one of its own where the same slot is used twice in a row
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from zeroshard.comm.collectives import Pending
from zeroshard.comm.copies import device_copies
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.peers import Channel, Peers
from zeroshard.engine.storage import Group, Unit
from zeroshard.engine.streams import Event, Step, Stream, Streams
from zeroshard.optim.kernels.rows import row_tiles, sum_rows

HELD = ("sending", 0)


@dataclass(frozen=True)
class _Piece:
    """Elements [low, high) of a gradient, and where they go; the same as bytes and addresses."""

    segment: int
    low: int
    high: int
    target: torch.Tensor
    address: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Route:
    """How a group's gradients travel: `rows` (ranks, n) are this rank's inbox, of which `tiles` are summed.

    `own` are the pieces for this rank itself, elements (low, high) of its part beside each.
    """

    pieces: list[_Piece]
    own: list[tuple[_Piece, int, int]]
    rows: torch.Tensor
    tiles: torch.Tensor
    dense: bool


class PeerReduce:
    """The way of gradients through peer memory.

    Attributes:
        last_slot: the inbox that was written last.
    """

    def __init__(self, peers: Peers, streams: Streams, log: OperationLog) -> None:
        self._peers = peers
        self._streams = streams
        self._log = log
        self._held: tuple[Event, Sequence[torch.Tensor | None]] | None = None
        self.adopt()

    def adopt(self) -> None:
        """Start anew with other slots; nothing may be in flight."""
        self._routes: dict[int, _Route] = {}
        self.last_slot: int | None = None

    def let_go(self) -> None:
        """Give back the gradients that were sent last."""
        if self._held is not None:
            # Write after read: the gradients belong to the reduce stream until they were sent.
            self._streams.wait(Stream.COMPUTE, self._held[0])
            self._streams.touch(writes=(HELD,))
            self._held = None

    def reduce(
        self,
        unit: Unit,
        group: Group,
        slot: int | None,
        sources: Sequence[torch.Tensor | None],
        landing: torch.Tensor,
        *,
        add: bool,
    ) -> None:
        """Reduce a group's gradients into `landing`, this rank's part.

        Args:
            sources: each parameter's gradient, in any shape; None where there is none.
            add: add to what `landing` holds.
        """
        route = self._route(group)
        wire, label, streams = ("wire", slot), unit.label, self._streams
        self.let_go()
        assert group.wire is not None
        nbytes = group.wire.nbytes
        self._log.record("reduce-scatter", label, nbytes)
        # Read after write: the gradients belong to compute until the unit's backward has run.
        streams.wait(Stream.REDUCE, streams.record(Stream.COMPUTE, "collected"))
        direct = not add and _in_place(route, sources, landing)
        meet = Step(self._barrier, (), (wire,), sends=True)
        steps = [Step(lambda: self._send(route, sources, label, nbytes, own=not direct), (HELD,), (wire,))]
        if slot == self.last_slot:
            steps.insert(0, meet)
        self.last_slot = slot
        streams.run(Stream.REDUCE, steps)
        grad = (("grad", unit.index),)
        if direct:
            other = route.rows[1 - self._peers.rank]
            streams.run(
                Stream.REDUCE, [meet, Step(lambda: _add_own(route, sources, other, landing), (wire, HELD), grad)]
            )
            self._held = streams.record(Stream.REDUCE, "done"), sources
        else:
            self._held = streams.record(Stream.REDUCE, "done"), sources
            total = partial(sum_rows, route.rows, landing, route.tiles, add=add, dense=route.dense)
            streams.run(Stream.REDUCE, [meet, Step(total, (wire,), grad)])
        if streams.poisons:
            streams.follow(Stream.REDUCE, lambda: route.rows.fill_(math.nan), (), (wire,))

    def _barrier(self) -> Pending:
        return self._peers.barrier(Channel.REDUCE)

    def _send(
        self, route: _Route, sources: Sequence[torch.Tensor | None], label: str, nbytes: int, *, own: bool
    ) -> None:
        self._peers.sent("reduce-scatter", label, nbytes)
        raw = device_copies(route.rows.device)
        pieces = [*route.pieces, *(piece for piece, _, _ in route.own)] if own else route.pieces
        if raw is None or any(source is None or source.dtype != route.rows.dtype for source in sources):
            for piece in pieces:
                source = sources[piece.segment]
                if source is None:
                    piece.target.zero_()
                else:
                    piece.target.copy_(source.view(-1)[piece.low : piece.high])
            return
        starts = [source.data_ptr() for source in sources if source is not None]
        stream = torch._C._cuda_getCurrentRawStream(route.rows.device.index)
        for piece in pieces:
            raw(piece.address, starts[piece.segment] + piece.offset, piece.nbytes, stream)

    def _route(self, group: Group) -> _Route:
        """Where a group's gradients go; made once, for inboxes stay where they are."""
        found = self._routes.get(id(group))
        if found is None:
            found = self._routes[id(group)] = self._make_route(group)
        return found

    def _make_route(self, group: Group) -> _Route:
        assert group.wire is not None
        layout, size, rank = group.plan.layout, self._peers.size, self._peers.rank
        pieces: list[_Piece] = []
        mine: list[tuple[_Piece, int, int]] = []
        for owner in ((rank + step) % size for step in range(1, size + 1)):  # own part last: it has no way to go
            row = self._peers.twin(group.wire, owner).view(size, -1)[rank]
            start, end = layout.shard_range(owner)
            for index, low, high in layout.pieces(start, end):
                segment = layout.segments[index]
                first, target = start + low - segment.offset, row[low:high]
                offset = first * target.itemsize
                piece = _Piece(index, first, first + high - low, target, target.data_ptr(), offset, target.nbytes)
                if owner == rank:
                    mine.append((piece, low, high))
                else:
                    pieces.append(piece)
        own = layout.pieces(*layout.shard_range(rank))
        tiles = row_tiles(((low, high) for _, low, high in own), group.wire.device)
        dense = sum(high - low for _, low, high in own) == layout.shard_numel
        return _Route(pieces, mine, group.wire.view(size, -1), tiles, dense)


def _in_place(route: _Route, sources: Sequence[torch.Tensor | None], landing: torch.Tensor) -> bool:
    """Whether this rank's own gradients can be added where they are: of two ranks, in one dtype."""
    dtype = route.rows.dtype
    return (
        route.rows.shape[0] == 2 and landing.dtype == dtype and all(s is not None and s.dtype == dtype for s in sources)
    )


def _add_own(route: _Route, sources: Sequence[torch.Tensor | None], other: torch.Tensor, landing: torch.Tensor) -> None:
    for piece, low, high in route.own:
        source = sources[piece.segment]
        assert source is not None
        torch.add(source.view(-1)[piece.low : piece.high], other[low:high], out=landing[low:high])
