"""Symmetric memory: peer memory of the GPUs of one host, from torch.distributed._symmetric_memory.

Each rank's buffer is mapped into every other process, and barriers are small kernels that spin on flags in it. The
memory comes from the driver, not from torch's caching allocator, and so is not in `torch.cuda.memory_allocated`.
Multicast is not used. Rejected: CUDA IPC handles of allocator memory, which bring no flags to wait on.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from zeroshard.comm.collectives import Pending
from zeroshard.comm.peers import Channel


class SymmetricMemory:
    """`nbytes` on each GPU of `group`, zeros; made by all ranks together."""

    def __init__(self, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self._buffer.zero_()
        self._handle = symmetric.rendezvous(self._buffer, group)
        self._views = [self._handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(self.size)]
        self._signals = [
            self._handle.get_signal_pad(rank, (len(Channel), self.size), torch.int32) for rank in range(self.size)
        ]
        self._beside = torch.cuda.Stream(device)
        self._write_signals(0)  # loads the kernels, which would wait for those that spin
        torch.cuda.synchronize(device)  # nobody writes to a peer that is still filling its zeros
        dist.barrier(group)

    def of(self, rank: int) -> torch.Tensor:
        return self._views[rank]

    def barrier(self, channel: Channel, event: torch.cuda.Event | None) -> Pending:
        self._handle.barrier(channel)
        return Pending("barrier", channel.name.lower(), event=event)

    def release(self) -> None:
        """Set the signals as if all ranks had come.

        torch's kernel spins until its signal to each peer, which the peer takes back, is 0, and those of the peers to
        this rank are 1; a signal's place is (channel, sender) in the memory of the receiver. The memory of a process
        that has ended stays mapped here.
        """
        self._write_signals(1)

    def _write_signals(self, from_peers: int) -> None:
        with torch.cuda.stream(self._beside):  # no wait: it must overtake the streams whose barriers spin
            self._signals[self.rank].fill_(from_peers)
            for rank, signals in enumerate(self._signals):
                if rank != self.rank:
                    signals[:, self.rank].zero_()
