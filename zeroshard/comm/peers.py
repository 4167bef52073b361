"""Peers: ranks that read and write each other's memory, so that collectives become copies.

    all-gather        barrier: all shards are written    -> copy every rank's shard into the slot
    reduce-scatter    copy each owner's part to its inbox -> barrier: all parts have come -> each owner sums its rows

    inbox of rank 1:  [ from rank 0 | from rank 1 | from rank 2 | ... ]

On GPUs of one host the copies run on the copy engines and leave the processors to compute; NCCL's kernels take a share
of them and of the power. Memory is symmetric: what lies at an offset here lies at the same offset on every peer.
A barrier waits for ever if a rank is lost. When the watchdog interrupts this rank, its barriers are released: what was
copied since is wrong, and the watchdog's error, which was set before, keeps it from being used.
Rejected: registering NCCL's buffers, which spares its copies but not its kernels.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Protocol

import torch

from zeroshard.comm.collectives import Pending
from zeroshard.comm.copies import device_copies
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.watchdog import Watchdog


class Channel(IntEnum):
    """A channel per stream, so that barriers of different streams do not match each other."""

    GATHER = 0
    REDUCE = 1
    WRITE = 2


class PeerMemory(Protocol):
    """A buffer on each rank of a group, of the same size everywhere, which all of them can access.

    Attributes:
        rank, size: this rank's place in the group, and how many there are.
    """

    rank: int
    size: int

    def of(self, rank: int) -> torch.Tensor:
        """The buffer of a rank, uint8 (nbytes,), on this rank's device."""
        ...

    def barrier(self, channel: Channel, event: torch.cuda.Event | None) -> Pending:
        """Issue a barrier on the current stream: what comes after it runs after all ranks have come to it.

        Args:
            event: what to mark the end with on a device.
        """
        ...

    def release(self) -> None:
        """Let barriers end that wait for ranks that are lost, on this rank; called again and again by a thread."""
        ...


ALIGNMENT_BYTES = 256
_RELEASE_S = 0.005
_LOGGER = logging.getLogger("zeroshard.comm")
PeerMemoryFactory = Callable[[int], PeerMemory]
"""Makes peer memory of that many bytes, filled with zeros; called by all ranks of the group together."""


class Peers:
    """The peer memory of one group: shards that others gather, and the inbox of gradients.

    Args:
        log: counts what is sent, as the collectives do.
    """

    def __init__(self, make: PeerMemoryFactory, log: OperationLog, watchdog: Watchdog | None) -> None:
        self._make = make
        self._log = log
        self._memories: dict[str, PeerMemory] = {}
        self._taken: dict[str, int] = {}
        self._last: Pending | None = None
        self._events: dict[Channel, torch.cuda.Event] = {}
        self._releasing: threading.Thread | None = None
        self._closed = threading.Event()
        if watchdog is not None:
            watchdog.watch(self._last_issued)
            watchdog.at_interrupt(self._release_barriers)

    def open(self, name: str, sizes: Iterable[int]) -> None:
        """Make (or make anew) the memory `name`, for `take` to be called with these bytes; called by all ranks."""
        self._memories[name] = self._make(max(sum(map(_aligned, sizes)), 1))
        self._taken[name] = 0

    def take(self, name: str, nbytes: int) -> torch.Tensor:
        """The next `nbytes` of this rank's buffer, uint8."""
        memory, start = self._memories[name], self._taken[name]
        self._taken[name] = start + _aligned(nbytes)
        return memory.of(memory.rank)[start : start + nbytes]

    def close(self) -> None:
        """Wait for the device, before the memory is freed; barriers are not released after that.

        The watchdog interrupts this rank in another thread if one that has not come to a barrier is lost. Without that
        nothing is released: a peer may not have seen this rank's last signals yet, and would wait for ever.
        """
        memory = self._memory_of_barriers()
        if memory.of(memory.rank).is_cuda:
            torch.cuda.synchronize(memory.of(memory.rank).device)
        self._closed.set()
        if self._releasing is not None:
            self._releasing.join()

    @property
    def size(self) -> int:
        return next(iter(self._memories.values())).size

    @property
    def rank(self) -> int:
        return next(iter(self._memories.values())).rank

    @property
    def nbytes(self) -> int:
        """Bytes of peer memory on this rank."""
        return sum(memory.of(memory.rank).numel() for memory in self._memories.values())

    def on_peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The memory on `rank` at the offset of the contiguous `tensor` on this rank."""
        if not tensor.numel():
            return tensor  # an empty tensor has no address
        for memory in self._memories.values():
            own = memory.of(memory.rank)
            offset = tensor.data_ptr() - own.data_ptr()
            if 0 <= offset < own.numel():
                there = memory.of(rank)[offset : offset + tensor.numel() * tensor.element_size()]
                return there.view(tensor.dtype).view(tensor.shape)
        raise AssertionError("the tensor is not in peer memory")

    def barrier(self, channel: Channel) -> Pending:
        """A barrier of all ranks on the current stream."""
        memory = self._memory_of_barriers()
        if not memory.of(memory.rank).is_cuda:
            self._last = memory.barrier(channel, None)
            return self._last
        if torch.cuda.is_current_stream_capturing():
            return memory.barrier(channel, None)  # has not happened: a graph's replay is watched as a whole
        event = self._events.get(channel)
        if event is None:
            event = self._events[channel] = torch.cuda.Event()
        self._last = memory.barrier(channel, event)
        return self._last

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, unit: str, own: Sequence[tuple[int, int]]
    ) -> Callable[[], Pending]:
        """A function that copies the other ranks' shards (n) into `whole` (size * n), and pieces of this rank's.

        Args:
            shard: may be this rank's slice of `whole`, of which nothing is copied.
            own: (start, end) of the elements of `shard` that are wanted in `whole`.
        """
        size, rank = self.size, self.rank
        parts = whole.view(size, -1)
        inside = parts[rank].data_ptr() == shard.data_ptr()
        copies = [
            (parts[peer], self.on_peer(whole, peer).view(size, -1)[peer] if inside else self.on_peer(shard, peer))
            for peer in ((rank + step) % size for step in range(1, size))  # not all from the same one at once
        ]
        if not inside:
            copies += [(parts[rank][start:end], shard[start:end]) for start, end in own]
        raw, device = device_copies(whole.device), whole.device.index
        addresses = [(target.data_ptr(), source.data_ptr(), target.nbytes) for target, source in copies]

        def launch() -> Pending:
            self._log.record("all-gather", unit, whole.nbytes)
            if raw is None:
                for target, source in copies:
                    target.copy_(source)
            else:
                stream = torch._C._cuda_getCurrentRawStream(device)
                for target, source, nbytes in addresses:
                    raw(target, source, nbytes, stream)
            return Pending("all-gather", unit)

        return launch

    def sent(self, kind: str, unit: str, nbytes: int) -> None:
        """Count a payload that the caller copied itself."""
        self._log.record(kind, unit, nbytes)

    def _last_issued(self) -> Pending | None:
        return self._last

    def _memory_of_barriers(self) -> PeerMemory:
        return next(iter(self._memories.values()))

    def _release_barriers(self) -> None:
        """Called by the watchdog. Later operations come to barriers too, so a thread releases them again and again."""
        if self._releasing is None and not self._closed.is_set():
            self._releasing = threading.Thread(target=self._release, name="zeroshard-release", daemon=True)
            self._releasing.start()

    def _release(self) -> None:
        memory = self._memory_of_barriers()
        try:
            while not self._closed.wait(_RELEASE_S):
                memory.release()
        except RuntimeError as error:  # the device has failed, which the main thread hears of in its next call
            _LOGGER.debug("barriers could not be released: %s", error)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
