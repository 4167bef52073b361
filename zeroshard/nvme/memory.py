"""A tier of memory on disk: rows that are read and written in parts of any size, at any element.

    row on disk      |block|block|block|block|          begins at a block, as everything that is moved past the cache
    elements wanted     [-------------]
    body                   |block|block|                 straight to or from where the caller has them
    edges               [--]           [-]               through a buffer of our own; a write reads the block first

A part whose memory is not at the same place within a block as on disk goes through the buffer as a whole; the windows
of the update are laid so that this does not happen. Rejected: rows padded to parts that are always whole blocks, which
leaves everyone else (checkpoints, access from outside) with copies of their own.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from zeroshard.nvme.choose import best_transfers
from zeroshard.nvme.cipher import BlockCipher
from zeroshard.nvme.places import Spill
from zeroshard.nvme.spill import SpillFile
from zeroshard.nvme.transfers import BLOCK, PATIENCE_S, MakeTransfers, in_blocks
from zeroshard.nvme.volume import Pending, Volume, nbytes_per_file
from zeroshard.tiers import Completion

BUFFER_NBYTES = 4 << 20
"""Of the buffer for what is not whole blocks; with encryption there are as many bytes of sealed blocks on their way."""
_SEALED = 1 << 20


class NvmeMemory:
    """A TierMemory (see zeroshard.tiers) of files in the folders of `spill`.

    Args:
        rank: of this process, for messages.
        nbytes: what the rows will take, reserved now.
        make_transfers: the reader and writer, or what a test puts in its place.
        patience: seconds after which a disk that does not answer is taken for stalled.

    Raises:
        PlanError: a folder can't be used, or has not the space.
    """

    def __init__(
        self,
        spill: Spill,
        rank: int,
        nbytes: int,
        *,
        make_transfers: MakeTransfers = best_transfers,
        patience: float = PATIENCE_S,
    ) -> None:
        self.used = self.pinned = self._taken = 0
        self._cipher = BlockCipher() if spill.encrypt else None
        share = nbytes_per_file(nbytes, len(spill.paths))
        files = [SpillFile(path, rank, share, allow_visible=spill.allow_visible) for path in spill.paths]
        self.volume = Volume(files, make_transfers(), patience)
        self._reserved = 0
        self.reserve(nbytes)
        self.buffer = _Buffer(BUFFER_NBYTES)
        self._sealed = None if self._cipher is None else _SealedBlocks(self._cipher, self.volume)
        self.lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, self.volume, os.getpid())

    def allocate(self, numel: int, dtype: torch.dtype) -> DiskRow:
        """See TierMemory. The files are new, so that unwritten blocks read as zeros."""
        begin, nbytes = self._taken, numel * dtype.itemsize
        self._taken += in_blocks(nbytes)
        if self._taken > self._reserved:
            self.reserve(self._taken - self._reserved)
        self.used += nbytes
        return DiskRow(self, begin, numel, dtype)

    def reserve(self, nbytes: int) -> None:
        """See TierMemory."""
        self._reserved += nbytes
        self.volume.reserve(self._reserved)
        if self._cipher is not None:
            self._cipher.reserve(self._reserved)

    def read_blocks(self, at: int, address: int, nbytes: int) -> Completion:
        """Begin to bring whole blocks to memory."""
        pending = self.volume.start(write=False, at=at, address=address, nbytes=nbytes)
        cipher = self._cipher
        if cipher is None:
            return pending.wait

        def arrived() -> None:
            pending.wait()
            cipher.unseal(at, address, nbytes)

        return arrived

    def write_blocks(self, at: int, address: int, nbytes: int) -> Completion:
        """Begin to put whole blocks on disk."""
        if self._sealed is not None:
            return self._sealed.write(at, address, nbytes)
        return self.volume.start(write=True, at=at, address=address, nbytes=nbytes).wait

    def close(self) -> None:
        """Give the space back; rows must not be used any more. May be called twice."""
        self._finalizer()


class DiskRow:
    """A Row (see zeroshard.tiers) on disk."""

    values = None

    def __init__(self, memory: NvmeMemory, begin: int, numel: int, dtype: torch.dtype) -> None:
        self._memory, self._begin = memory, begin
        self.numel, self.dtype = numel, dtype

    def read(self, start: int, into: torch.Tensor) -> Completion | None:
        """See Row."""
        low, high = self._range(start, into)
        begin, end = _body(low, high, into)
        arrived: list[Completion] = []
        if begin < end:
            arrived.append(self._memory.read_blocks(begin, into.data_ptr() + begin - low, end - begin))
        for edge_low, edge_high in _edges(low, high, begin, end):
            arrived.append(lambda a=edge_low, b=edge_high: self._read_edge(a, b, low, into))
        return _all(arrived, into)

    def write(self, start: int, source: torch.Tensor) -> Completion | None:
        """See Row."""
        low, high = self._range(start, source)
        begin, end = _body(low, high, source)
        written: list[Completion] = []
        if begin < end:
            written.append(self._memory.write_blocks(begin, source.data_ptr() + begin - low, end - begin))
        for edge_low, edge_high in _edges(low, high, begin, end):
            self._write_edge(edge_low, edge_high, low, source)
        return _all(written, source)

    def _range(self, start: int, values: torch.Tensor) -> tuple[int, int]:
        """The bytes on disk of as many elements from `start` on."""
        assert values.dtype == self.dtype, f"a row of {self.dtype} and a tensor of {values.dtype}"
        assert values.is_contiguous(), "elements that lie one after the other"
        assert 0 <= start <= start + values.numel() <= self.numel, "elements that the row does not have"
        low = self._begin + start * self.dtype.itemsize
        return low, low + values.nbytes

    def _read_edge(self, low: int, high: int, origin: int, into: torch.Tensor) -> None:
        memory, target = self._memory, into.view(torch.uint8)
        with memory.lock:
            for at, nbytes, first, last in _through(low, high):
                memory.read_blocks(at, memory.buffer.address, nbytes)()
                target[first - origin : last - origin].copy_(memory.buffer.bytes[first - at : last - at])

    def _write_edge(self, low: int, high: int, origin: int, source: torch.Tensor) -> None:
        """Blocks of which only a part changes are read first."""
        memory, given = self._memory, source.view(torch.uint8)
        with memory.lock:
            for at, nbytes, first, last in _through(low, high):
                address = memory.buffer.address
                if first > at:
                    memory.read_blocks(at, address, BLOCK)()
                if last < at + nbytes and (nbytes > BLOCK or first == at):
                    memory.read_blocks(at + nbytes - BLOCK, address + nbytes - BLOCK, BLOCK)()
                memory.buffer.bytes[first - at : last - at].copy_(given[first - origin : last - origin])
                memory.write_blocks(at, address, nbytes)()


def _body(low: int, high: int, values: torch.Tensor) -> tuple[int, int]:
    """The whole blocks of [low, high) moved straight from or to where `values` is; (high, high) for none."""
    begin, end = in_blocks(low), high // BLOCK * BLOCK
    if begin >= end or values.device.type != "cpu" or (values.data_ptr() + begin - low) % BLOCK:
        return high, high
    return begin, end


def _edges(low: int, high: int, begin: int, end: int) -> list[tuple[int, int]]:
    """What of [low, high) is outside of [begin, end)."""
    return [(a, b) for a, b in ((low, begin), (end, high)) if a < b]


def _through(low: int, high: int) -> list[tuple[int, int, int, int]]:
    """Pieces of [low, high) that fit into the buffer: whole blocks (at, bytes), and what of them is wanted."""
    found: list[tuple[int, int, int, int]] = []
    at = low // BLOCK * BLOCK
    while at < high:
        nbytes = min(BUFFER_NBYTES, in_blocks(high - at))
        found.append((at, nbytes, max(low, at), min(high, at + nbytes)))
        at += nbytes
    return found


def _all(completions: Sequence[Completion], memory: torch.Tensor) -> Completion | None:
    """All of them; every one is waited for, whatever happens to the others.

    It holds `memory`, which the transfers know by its address alone, so that it is not freed before they have ended.
    """
    if not completions:
        return None

    def finish(_held: torch.Tensor = memory) -> None:
        errors: list[RuntimeError] = []
        for completion in completions:
            try:
                completion()
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    return finish


class _Buffer:
    """Memory of whole blocks, beginning at one."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.address = self.bytes.data_ptr()


class _SealedBlocks:
    """Encrypted copies of blocks on their way to disk: what is to be written stays as it is where the caller has it."""

    def __init__(self, cipher: BlockCipher, volume: Volume) -> None:
        self._cipher, self._volume = cipher, volume
        self._places = deque((_Buffer(_SEALED), Pending((), 0.0)) for _ in range(BUFFER_NBYTES // _SEALED))
        self._turn = threading.Lock()

    def write(self, at: int, address: int, nbytes: int) -> Callable[[], None]:
        """Encrypt and begin to write; waits for a place where all are on their way."""
        begun: list[Pending] = []
        with self._turn:
            generation = self._cipher.new_generation()
            for start in range(0, nbytes, _SEALED):
                length = min(_SEALED, nbytes - start)
                place, before = self._places.popleft()
                try:
                    before.wait()
                    self._cipher.seal(at + start, address + start, place.address, length, generation)
                    before = self._volume.start(write=True, at=at + start, address=place.address, nbytes=length)
                finally:
                    self._places.append((place, before))
                begun.append(before)

        def written() -> None:
            for one in begun:
                one.wait()

        return written


def _close(volume: Volume, process: int) -> None:
    if process == os.getpid():  # a fork has the files open too, but neither threads nor anything under way
        volume.close()
