"""How fast folders are written and read, as training would do it, and beside it what plain system calls reach there.

    written, read    windows of 48 MiB, three under way, by our own reader and writer
    both             the step's own pattern: window k + 1 is read while window k is written back, each of three rows
                     (master weights and two moments) that lie a third of the files apart
    plain            preadv and pwritev of blocks of 16 MiB past the page cache, by one thread and by four: the better

Everything is measured on the same files, in turns, after they were written once: blocks that were only reserved are
slower the first time. Rejected: a file of zeros, which some disks and file systems do not store.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from zeroshard.nvme.choose import best_transfers
from zeroshard.nvme.places import Spill
from zeroshard.nvme.spill import SpillFile
from zeroshard.nvme.volume import Pending, Volume, nbytes_per_file

WINDOW = 48 << 20
WINDOWS = 3
_ROWS = 3
_BLOCK = 16 << 20
_THREADS = (1, 4)


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second; `both` counts what is read and what is written.

    Attributes:
        name: how bytes were moved, and where.
        plain_written, plain_read: by plain system calls.
    """

    name: str
    written: float
    read: float
    both: float
    plain_written: float
    plain_read: float

    def step_seconds(self, nbytes: int) -> float:
        """Seconds in which a step reads and writes a state of `nbytes`."""
        return 2 * nbytes / self.both

    def parameter_seconds(self, nbytes: int) -> float:
        """Seconds in which a step reads parameters of `nbytes` for forward and backward, and writes them once."""
        return 2 * nbytes / self.read + nbytes / self.written


def measure_disk(paths: Sequence[str], nbytes: int, rounds: int = 3) -> DiskRates:
    """Measure folders with `nbytes` of files in all, which are gone afterwards.

    Raises:
        PlanError: a folder can't be used, or has not the room.
    """
    passes = DiskPasses(paths, nbytes)
    try:
        return passes.rates(rounds)
    finally:
        passes.close()


class StatePass:
    """The way of a step through a state of `nbytes` in a volume, which is overwritten; whole windows only."""

    def __init__(self, volume: Volume, nbytes: int) -> None:
        self._volume, self._count = volume, nbytes // WINDOW
        self._memory = torch.frombuffer(_huge_pages(WINDOWS * WINDOW), dtype=torch.uint8)
        self._memory.random_(0, 256)

    def both(self) -> int:
        """As zeroshard.optim.windows goes through a step's state, without the update; returns the bytes moved."""
        if self._count == 0:
            return 0
        reads, writes = {0: self._start_rows(0, write=False)}, dict[int, list[Pending]]()
        for number in range(self._count):
            following = number + 1
            if following < self._count:
                _wait(writes.pop(following - WINDOWS, ()))
                reads[following] = self._start_rows(following, write=False)
            _wait(reads.pop(number))
            writes[number] = self._start_rows(number, write=True)
        for pending in writes.values():
            _wait(pending)
        return 2 * self._count * WINDOW

    def _start_rows(self, number: int, *, write: bool) -> list[Pending]:
        address, row = self._memory.data_ptr() + number % WINDOWS * WINDOW, WINDOW // _ROWS
        return [
            self._volume.start(
                write=write, at=(which * self._count + number) * row, address=address + which * row, nbytes=row
            )
            for which in range(_ROWS)
        ]


class DiskPasses(StatePass):
    """Ways through files in some folders; each returns the bytes that it moved. Raises as `measure_disk`."""

    def __init__(self, paths: Sequence[str], nbytes: int) -> None:
        spill, nbytes = Spill(tuple(paths)), max(WINDOWS, nbytes // WINDOW) * WINDOW
        share = nbytes_per_file(nbytes, len(spill.paths))
        self._files = [SpillFile(path, 0, share) for path in spill.paths]
        super().__init__(Volume(self._files, best_transfers()), nbytes)
        self._content = os.urandom(_BLOCK)
        self.write()

    def rates(self, rounds: int) -> DiskRates:
        """Medians of so many rounds, in each of which every way has a turn."""
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, run in self.all().items():
                began = time.perf_counter()
                moved = run()
                found.setdefault(name, []).append(moved / (time.perf_counter() - began))
        rates = {name: statistics.median(values) for name, values in found.items()}
        plain = {way: max(rates[f"{way} {threads}"] for threads in _THREADS) for way in ("write", "read")}
        return DiskRates(self._volume.name, rates["write"], rates["read"], rates["both"], plain["write"], plain["read"])

    def close(self) -> None:
        """Give the space back."""
        self._volume.close()

    def all(self) -> dict[str, Callable[[], int]]:
        """By name, in the order of a round."""
        found: dict[str, Callable[[], int]] = {"write": self.write, "read": self.read, "both": self.both}
        for threads in _THREADS:
            found[f"write {threads}"] = partial(self._plain, threads, write=True)
            found[f"read {threads}"] = partial(self._plain, threads, write=False)
        return found

    def write(self) -> int:
        return self._one_way(write=True)

    def read(self) -> int:
        return self._one_way(write=False)

    def _one_way(self, *, write: bool) -> int:
        pending: dict[int, Pending] = {}
        for number in range(self._count):
            if number >= WINDOWS:
                pending.pop(number - WINDOWS).wait()
            pending[number] = self._start(number, write=write)
        for one in pending.values():
            one.wait()
        return self._count * WINDOW

    def _start(self, number: int, *, write: bool) -> Pending:
        address = self._memory.data_ptr() + number % WINDOWS * WINDOW
        return self._volume.start(write=write, at=number * WINDOW, address=address, nbytes=WINDOW)

    def _plain(self, threads: int, *, write: bool) -> int:
        """All files, block by block, each thread with blocks of its own."""
        blocks = [(file.descriptor, at) for file in self._files for at in range(0, file.nbytes - _BLOCK + 1, _BLOCK)]

        def move(first: int) -> int:
            with _huge_pages(_BLOCK) as block:
                block.write(self._content)
                moved = 0
                for descriptor, at in blocks[first::threads]:
                    moved += os.pwritev(descriptor, [block], at) if write else os.preadv(descriptor, [block], at)
                return moved

        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(move, range(threads)))


def _huge_pages(nbytes: int) -> mmap.mmap:
    """Memory as the windows of training have it: a request of few large pieces takes a disk half as long."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them: only slower
        memory.madvise(getattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NORMAL))
    return memory


def _wait(pending: Iterable[Pending]) -> None:
    for one in pending:
        one.wait()
