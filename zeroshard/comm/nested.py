"""Collectives in two halves, within and between subgroups of ranks, for layouts in nested order (mesh.NESTED).

    ranks       0 1 | 2 3        two subgroups of two
    parts       0 2 | 1 3        which part of a layout each rank has
    all-gather  between subgroups: rank 0 gets parts 0 1, rank 1 parts 2 3;  within: all get 0 1 2 3

A communicator numbers its ranks as the job does, so a single all-gather would order the parts by rank. In a step each
half is a leg of its own; this class is for gathers and reduces outside of the lists. Rejected: communicators with
another order of ranks, because older versions of torch sort them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Collectives, Pending
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.watchdog import Watchdog
from zeroshard.errors import UsageError


class NestedCollectives(Collectives):
    """As Collectives over all the ranks, but parts are in nested order.

    Args:
        group: of all the ranks, which serves what has no parts.
        within, beyond: over the ranks of a subgroup, and over those with the same place in each subgroup.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        name: str,
        log: OperationLog,
        watchdog: Watchdog,
        within: Collectives,
        beyond: Collectives,
    ) -> None:
        super().__init__(group, name, log, watchdog)
        self._within, self._beyond = within, beyond

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, unit: str) -> Pending:
        """See Collectives."""
        if self._group is None:
            return super().all_gather(out, shard, unit)
        half = out.new_empty(shard.numel() * self._beyond.size)
        self._beyond.wait(self._beyond.all_gather(half, shard, unit))
        return self._within.all_gather(out, half, unit)

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, unit: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Pending:
        """See Collectives."""
        if self._group is None:
            return super().reduce_scatter(shard, full, unit, op)
        half = full.new_empty(shard.numel() * self._beyond.size)
        self._within.wait(self._within.reduce_scatter(half, full, unit, op))
        return self._beyond.reduce_scatter(shard, half, unit, op)

    def all_to_all(
        self,
        out: torch.Tensor,
        data: torch.Tensor,
        out_splits: list[int],
        in_splits: list[int],
        unit: str,
        nbytes: int,
    ) -> Pending:
        """Refused, since no plan in nested order needs it."""
        raise UsageError(f"unit {unit!r}: an all-to-all over {self.name} is not supported")
