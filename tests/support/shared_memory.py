"""Peer memory between processes of one host, for tests without GPUs: files that every rank maps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Pending
from zeroshard.comm.peers import Channel, PeerMemory


class SharedFiles:
    """One file per rank in `directory`, mapped by all; barriers are gloo's, on a communicator per channel."""

    def __init__(self, nbytes: int, directory: Path, groups: dict[Channel, dist.ProcessGroup]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._groups = groups
        paths = [directory / f"{rank}.bin" for rank in range(self.size)]
        paths[self.rank].parent.mkdir(parents=True, exist_ok=True)
        paths[self.rank].write_bytes(bytes(nbytes))
        dist.barrier()
        self._views = [
            torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)  # type: ignore[call-overload]
            for path in paths
        ]
        dist.barrier()

    def of(self, rank: int) -> torch.Tensor:
        return self._views[rank]

    def barrier(self, channel: Channel, event: object) -> Pending:
        work = dist.all_reduce(torch.zeros(1), group=self._groups[channel], async_op=True)
        return Pending("barrier", channel.name.lower(), work)

    def release(self) -> None:
        """gloo's barriers end by themselves when a rank is lost."""


def shared_files(directory: str) -> Callable[[int], PeerMemory]:
    """A factory of peer memory over files in `directory`; called by all ranks together."""
    groups: dict[Channel, dist.ProcessGroup] = {}
    for channel in Channel:
        group = dist.new_group(list(range(dist.get_world_size())))
        assert isinstance(group, dist.ProcessGroup)
        groups[channel] = group
    serial = itertools.count()
    return lambda nbytes: SharedFiles(nbytes, Path(directory) / str(next(serial)), groups)
