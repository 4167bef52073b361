"""An all-gather over all ranks before there is a watchdog, which names the ranks that do not take part.

    all-gather is running     no rank is missing: wait
                              some ranks are missing: name them in a warning, and give up shortly before the group does
    all-gather has failed     a rank has ended, or is in another collective: name the missing ranks

Each rank marks its arrival in the store of the default process group. Ranks may arrive minutes apart, for example if
one downloads a model first. So the wait ends only shortly before the group's timeout, after which torch would report a
socket or, with NCCL, end the process. Rejected: a shorter limit, which would end such runs.
"""

from __future__ import annotations

import logging
import time

import torch
import torch.distributed as dist

from zeroshard.comm.mesh import group_timeout
from zeroshard.errors import UsageError

WARN_S = 10.0
_SHARE = 0.9
"""Of the group's timeout that is waited."""
_POLL_S = 0.005
_LOGGER = logging.getLogger("zeroshard")


def gather_from_all(own: torch.Tensor, place: str, cure: str) -> list[torch.Tensor]:
    """The tensor of every rank of the default group; called by all ranks at the same `place`.

    Args:
        place: where all ranks have to come, for the message.
        cure: what to do if they don't.

    Raises:
        UsageError: some ranks did not come within the group's timeout, or have ended.
    """
    attendance = _Attendance(place)
    others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    begun, warned, limit = time.monotonic(), False, _SHARE * group_timeout().total_seconds()
    try:
        work = dist.all_gather(others, own, async_op=True)
        assert work is not None
        while not work.is_completed():
            time.sleep(_POLL_S)
            waited = time.monotonic() - begun
            if waited > WARN_S and not warned:
                warned = True
                _LOGGER.warning(
                    "rank %d waits at %s for ranks %s; %s", dist.get_rank(), place, attendance.absent(), cure
                )
            if waited > limit and (absent := attendance.absent()):
                raise UsageError(f"{place}: ranks {absent} have not come in {limit:.0f} seconds; {cure}")
        work.wait()
    except RuntimeError as error:  # of gloo and NCCL, which have kinds of their own
        absent = attendance.absent()
        if not absent:
            raise
        raise UsageError(f"{place}: ranks {absent} have ended, or are in another collective; {cure}") from error
    return others


class _Attendance:
    """Marks that this rank has arrived at a place, and counts how often it has."""

    def __init__(self, place: str) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._store = dist.PrefixStore(f"zeroshard/{place}", world.get_group_store())
        self._time = self._store.add(f"times/{dist.get_rank()}", 1)
        self._store.set(self._key(dist.get_rank()), "here")

    def absent(self) -> list[int]:
        """The ranks that have not come as often."""
        return [rank for rank in range(dist.get_world_size()) if not self._store.check([self._key(rank)])]

    def _key(self, rank: int) -> str:
        return f"{self._time}/{rank}"
