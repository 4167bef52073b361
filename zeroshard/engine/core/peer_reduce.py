"""Reduce-scatter by copies: gradients go from where autograd left them straight into the inboxes of their owners.

    p.grad --copy engine--> inbox of its owner, row of this rank --barrier--> owner sums its rows --> grad

No buffer is collected first, so each gradient is moved once. The owner adds the received rows to its own gradient,
which stays where autograd left it, so the owner's own row stays empty. The same kernel squares the sums for the norm. A
gradient stays alive until it was sent and added, which is checked one unit later, when it has long happened. Memory and
hazards:

    a gradient           belongs to the reduce stream until the event `done`; compute waits for it before the release
    a row of an inbox    is written by its rank until the barrier, then read by the owner's sum. The next copies into it
                         come after another barrier, which no rank reaches before its sum: the barrier of a unit in
                         between, or an extra one if the same slot is used twice in a row
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroshard.comm.collectives import Pending
from zeroshard.comm.copies import device_copies
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.peers import Channel, Peers
from zeroshard.engine.core.streams import Event, Step, Streams
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.unit import Unit
from zeroshard.optim.kernels.rows import OwnPiece, RowSum
from zeroshard.plan.legs import Stream

SENDING = ("sending", 0)


@dataclass(frozen=True)
class _Piece:
    """Elements [low, high) of a gradient and their target, also as bytes and addresses."""

    segment: int
    low: int
    high: int
    target: torch.Tensor
    address: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Path:
    """Where a group's gradients are copied to.

    Attributes:
        pieces: the parts of gradients that go to other ranks.
        own: the parts that this rank owns.
        rows: this rank's inbox (ranks, n).
        total: sums the rows.
    """

    pieces: list[_Piece]
    own: list[_Piece]
    rows: torch.Tensor
    total: RowSum


class PeerReduce:
    """Reduces gradients through peer memory.

    Attributes:
        last_slot: the inbox that was written last.
    """

    def __init__(self, peers: Peers, streams: Streams, log: OperationLog) -> None:
        self._peers = peers
        self._streams = streams
        self._log = log
        self._sending: tuple[Event, Sequence[torch.Tensor | None]] | None = None
        self.adopt()

    def adopt(self) -> None:
        """Start anew with other slots; nothing may be in flight."""
        self._paths: dict[int, _Path] = {}
        self.last_slot: int | None = None

    def release_sent(self) -> None:
        """Release the gradients that were sent last."""
        if self._sending is not None:
            # Write after read: the reduce stream must have sent the gradients.
            self._streams.wait(Stream.COMPUTE, self._sending[0])
            self._streams.touch(writes=(SENDING,))
            self._sending = None

    def reduce(
        self,
        unit: Unit,
        group: Group,
        slot: int | None,
        sources: Sequence[torch.Tensor | None],
        landing: torch.Tensor,
        *,
        add: bool,
        squares: torch.Tensor | None = None,
    ) -> None:
        """Reduce a group's gradients into `landing`, this rank's part.

        Args:
            sources: each parameter's gradient, in any shape; None where there is none.
            add: add to what `landing` holds.
            squares: float64, one for each tile of `landing`, which gets the squares of the sums; see `SquaredNorm`.
        """
        route = self._path(group)
        wire, label, streams = ("wire", slot), unit.label, self._streams
        self.release_sent()
        assert group.wire is not None
        nbytes = group.wire.nbytes
        self._log.record("reduce-scatter", label, nbytes)
        # Read after write: compute must have run the unit's backward.
        streams.wait(Stream.REDUCE, streams.record(Stream.COMPUTE, "collected"))
        adds_own_directly = _can_add_own_directly(route, sources)
        own = sources if adds_own_directly else None
        barrier = Step(self._barrier, (), (wire,), sends=True)
        send = Step(lambda: self._send(route, sources, label, nbytes, own=not adds_own_directly), (SENDING,), (wire,))
        total = Step(
            lambda: route.total(route.rows, landing, own=own, add=add, squares=squares),
            (wire, SENDING) if adds_own_directly else (wire,),
            (("grad", unit.index),),
        )
        steps = [barrier, send] if slot == self.last_slot else [send]
        self.last_slot = slot
        if adds_own_directly:
            streams.run(Stream.REDUCE, [*steps, barrier, total])
            self._sending = streams.record(Stream.REDUCE, "done"), sources
        else:
            streams.run(Stream.REDUCE, steps)
            self._sending = streams.record(Stream.REDUCE, "done"), sources
            streams.run(Stream.REDUCE, [barrier, total])
        if streams.poisons:
            streams.enqueue(Stream.REDUCE, lambda: route.rows.fill_(math.nan), (), (wire,))

    def _barrier(self) -> Pending:
        return self._peers.barrier(Channel.REDUCE)

    def _send(
        self, route: _Path, sources: Sequence[torch.Tensor | None], label: str, nbytes: int, *, own: bool
    ) -> None:
        self._peers.sent("reduce-scatter", label, nbytes)
        raw = device_copies(route.rows.device)
        pieces = [*route.pieces, *route.own] if own else route.pieces
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

    def _path(self, group: Group) -> _Path:
        """The targets of a group's gradients; made once, since inboxes do not move."""
        found = self._paths.get(id(group))
        if found is None:
            found = self._paths[id(group)] = self._make_path(group)
        return found

    def _make_path(self, group: Group) -> _Path:
        assert group.wire is not None
        layout, size, rank = group.plan.layout, self._peers.size, self._peers.rank
        pieces: list[_Piece] = []
        mine: list[_Piece] = []
        summed: list[OwnPiece] = []
        for owner in ((rank + step) % size for step in range(1, size + 1)):  # own part last: it needs no copy
            row = self._peers.on_peer(group.wire, owner).view(size, -1)[rank]
            start, end = layout.shard_range(owner)
            for index, low, high in layout.pieces(start, end):
                segment = layout.segments[index]
                first, target = start + low - segment.offset, row[low:high]
                offset = first * target.itemsize
                piece = _Piece(index, first, first + high - low, target, target.data_ptr(), offset, target.nbytes)
                (mine if owner == rank else pieces).append(piece)
                if owner == rank:
                    summed.append(OwnPiece(index, first, low, high))
        return _Path(pieces, mine, group.wire.view(size, -1), RowSum(summed, rank, group.wire.device))


def _can_add_own_directly(route: _Path, sources: Sequence[torch.Tensor | None]) -> bool:
    """Whether the kernel can read this rank's own gradients where autograd left them."""
    own = (sources[piece.segment] for piece in route.own)
    return all(source is not None and source.dtype == route.rows.dtype for source in own)
