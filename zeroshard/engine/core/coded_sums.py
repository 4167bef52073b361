"""Reduces gradients as quantized codes (qgZ): encode, all-to-all and sum, all on the reduce stream.

    exchange    [ codes for each rank | codes from each rank | float32 sum between two hops ]

All groups use the same exchange memory, one after the other, since the legs of a stream run in order. The rounding
errors of each group's last codes are kept per group (`Group.errors`). Rejected: exchange memory per reduce slot; there
are two slots, but only one all-to-all runs at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.oplog import OperationLog
from zeroshard.engine.core.leg_context import Action, BackwardArgs, LegContext
from zeroshard.engine.core.streams import Streams
from zeroshard.engine.memory.block_codes import decode_sum, encode
from zeroshard.engine.memory.group import Group
from zeroshard.mesh import Axes
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.hops import SUM_DTYPE, exchange_nbytes
from zeroshard.plan.legs import Buffer, Leg


class CodedSums:
    """Makes the actions of the legs that quantize, exchange and sum.

    Args:
        reduces: the reduce communicators, by mesh axes.
        log: records what this rank issues, in the order of the lists.
        memory: the exchange memory, uint8; None if the plan has no quantized reduces.
    """

    def __init__(
        self, streams: Streams, reduces: Mapping[Axes, Collectives], log: OperationLog, memory: torch.Tensor | None
    ) -> None:
        self._streams, self._reduces, self._log, self._memory = streams, reduces, log, memory

    def tensor(self, group: Group, buffer: Buffer, hop: int = 0) -> torch.Tensor:
        """The part of the exchange memory that a leg of this hop reads or writes."""
        assert self._memory is not None
        sizes = group.plan.hop_sizes
        most, middle = exchange_nbytes(sizes)
        if buffer is Buffer.MIDDLE:
            return self._memory[2 * most : 2 * most + middle].view(torch_dtype(SUM_DTYPE))
        start = 0 if buffer is Buffer.CODES else most
        return self._memory[start : start + sizes[hop].nbytes]

    def encode(self, leg: Leg, context: LegContext) -> Action:
        """Write a record of the source for each rank of the hop."""
        group, hop = context.group, context.group.plan.hops[leg.hop]
        ranks, error = group.plan.hop_sizes[leg.hop].ranks, group.errors[leg.hop]
        records = self.tensor(group, Buffer.CODES, leg.hop)
        buffers = context.names(leg.source), context.names(leg.target)
        sums = 0

        def renew() -> None:
            nonlocal sums
            if hop.feedback is not None and error is not None and hop.feedback.reset:
                if sums == hop.feedback.reset:
                    error.zero_()
                    sums = 0
                sums += 1

        def run(_: BackwardArgs) -> None:
            source = context.tensor(leg.source)

            def work() -> None:
                renew()
                encode(source, records, hop.blocks, ranks=ranks, error=error, feedback=hop.feedback)

            self._streams.enqueue(leg.stream, work, *buffers)

        return run

    def exchange(self, leg: Leg, context: LegContext) -> Action:
        """Send each record to its rank (all-to-all)."""
        collectives, label, nbytes = self._reduces[leg.axes], context.unit.label, leg.nbytes
        size, buffers = context.group.plan.hop_sizes[leg.hop], context.names(leg.source, leg.target)
        out, codes = (self.tensor(context.group, buffer, leg.hop) for buffer in (leg.target, leg.source))
        split = [size.record] * size.ranks

        def send(_: BackwardArgs) -> None:
            self._log.record("all-to-all", label, nbytes)
            self._streams.launch(
                leg.stream, lambda: collectives.all_to_all(out, codes, split, split, label, nbytes), (), buffers
            )

        return send

    def sum(self, leg: Leg, context: LegContext) -> Action:
        """Sum the decoded records, in the order of ranks."""
        group, hop, ranks = context.group, context.group.plan.hops[leg.hop], context.group.plan.hop_sizes[leg.hop].ranks
        records = self.tensor(group, Buffer.ARRIVED, leg.hop)
        buffers = context.names(leg.source), context.names(leg.target, Buffer.GRAD)

        def run(args: BackwardArgs) -> None:
            target, add = context.tensor(leg.target), leg.adds and args.add
            self._streams.enqueue(leg.stream, lambda: decode_sum(records, ranks, target, hop.blocks, add=add), *buffers)

        return run
