"""A folder on a disk for tests of state there, and readers and writers that fail when they are told to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from zeroshard.errors import PlanError
from zeroshard.nvme.choose import best_transfers
from zeroshard.nvme.memory import DiskRow, NvmeMemory
from zeroshard.nvme.places import Spill
from zeroshard.nvme.spill import SpillFile
from zeroshard.nvme.transfers import Transfer
from zeroshard.plan.offload import disk_nbytes
from zeroshard.plan.plan import Plan
from zeroshard.tiers import Completion


@contextmanager
def disk_folder(preferred: Path) -> Iterator[Path]:
    """A folder that takes direct I/O: `preferred`, or one beside the tests where that is in memory."""
    try:
        SpillFile(str(preferred), 0, 0).close()
        yield preferred
    except PlanError:
        with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as other:
            yield Path(other)


def memory_in(*folders: Path, nbytes: int = 1 << 22, rank: int = 0, encrypt: bool = False) -> NvmeMemory:
    """Memory on disk in some folders."""
    return NvmeMemory(Spill(tuple(map(str, folders)), encrypt), rank, nbytes)


def spill_descriptors(folder: Path) -> list[int]:
    """The open files of this process in `folder` that have no name."""
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # that of the listing itself
            continue
        if target.startswith(f"{folder}/") and target.endswith(" (deleted)"):
            found.append(int(name))
    return found


class CountedMemory(NvmeMemory):
    """Memory on disk that counts the bytes of its rows that are read and written."""

    read = written = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> DiskRow:
        return CountedRow(self, super().allocate(numel, dtype))


class CountedDisk:
    """Makes a rank's `CountedMemory` in a folder, as `shard(tiers=...)` calls it, and keeps it as `made`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._spill, self._rank = Spill((str(folder),)), rank
        self.made: CountedMemory | None = None

    def __call__(self, plan: Plan, device: torch.device) -> NvmeMemory:
        self.made = CountedMemory(self._spill, self._rank, disk_nbytes(plan))
        return self.made


class CountedRow(DiskRow):
    """A row of `CountedMemory`."""

    def __init__(self, memory: CountedMemory, row: DiskRow) -> None:
        super().__init__(memory, row._begin, row.numel, row.dtype)
        self._counts = memory

    def read(self, start: int, into: torch.Tensor) -> Completion | None:
        self._counts.read += into.nbytes
        return super().read(start, into)

    def write(self, start: int, source: torch.Tensor) -> Completion | None:
        self._counts.written += source.nbytes
        return super().write(start, source)


class FailingTransfer:
    """A transfer that ends with an error."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def wait(self, seconds: float) -> None:
        raise self._error


class FailingTransfers:
    """A Transfers that hands on to a real one, and fails some transfers after it was told to.

    How many transfers a step needs depends on where the allocator puts memory, so that a count from the beginning on
    may be over at any time.

    Args:
        error: what the failing ones end with.
        write: whether writes fail, or reads.
    """

    name = "failing"

    def __init__(self, error: OSError, *, write: bool) -> None:
        self._inner, self._error, self._write = best_transfers(), error, write
        self._left: int | None = None

    def fail_after(self, count: int) -> None:
        """From now on so many of the kind succeed, and none after them."""
        self._left = count

    def start(self, *, write: bool, file: int, offset: int, address: int, nbytes: int) -> Transfer:
        if write == self._write and self._left is not None:
            self._left -= 1
            if self._left < 0:
                return FailingTransfer(self._error)
        return self._inner.start(write=write, file=file, offset=offset, address=address, nbytes=nbytes)

    def close(self) -> None:
        self._inner.close()
