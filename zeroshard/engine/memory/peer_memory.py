"""Allocates shards and reduce slots in peer memory, where ranks of one host can copy from and to each other.

    "shards"    every group that is gathered, in the order of the plan: its shard, or whole parameters that rest whole
    "inbox"     the reduce slots; allocated again when another order of units needs other slots

Layouts are the same on all ranks, so the same tensor on a peer has the same offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from zeroshard.comm.mesh import RankMesh
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.peers import PeerMemoryFactory, Peers
from zeroshard.comm.watchdog import Watchdog
from zeroshard.errors import PlanError
from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.plan import Plan


class PeerAllocator:
    """Allocates from peer memory. Called by all ranks in the same order."""

    def __init__(self, peers: Peers, plan: Plan) -> None:
        self._peers = peers
        peers.open("shards", _shards(plan))

    def shard(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._peers.take("shards", numel * dtype.itemsize).view(dtype)

    def slots(self, nbytes: Sequence[int]) -> list[torch.Tensor]:
        self._peers.open("inbox", nbytes)
        return [self._peers.take("inbox", size) for size in nbytes]


def open_peers(
    plan: Plan,
    mesh: RankMesh,
    device: torch.device,
    log: OperationLog,
    watchdog: Watchdog,
    factory: PeerMemoryFactory | None = None,
) -> Peers | None:
    """The peer memory of a plan, None where it has none.

    Args:
        factory: allocates the memory; by default symmetric memory of the GPUs.

    Raises:
        PlanError: the plan wants copies between peers, but these ranks can't reach each other's memory.
    """
    if not plan.policy.peer_copies:
        return None
    if factory is None:
        over = {unit.axes_of(group) for unit, group in plan.groups() if group.layout.shards > 1}
        gather = mesh.over(over.pop()).gather if len(over) == 1 else None
        if device.type != "cuda" or gather is None:
            raise PlanError(
                "policy.peer_copies needs GPUs that reach each other's memory; make the plan on these ranks"
            )
        from zeroshard.comm.symmetric import SymmetricMemory

        factory = partial(SymmetricMemory, group=gather, device=device)
    return Peers(factory, log, watchdog)


def _shards(plan: Plan) -> list[int]:
    return [
        group.numel_per_rank(group.param) * itemsize(group.param.dtype)
        for _, group in plan.groups()
        if group.is_gathered
    ]
