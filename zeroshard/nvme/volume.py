"""The files of one rank as one range of bytes, striped over the folders, with every error named by folder and rank.

    range      chunk 0 | chunk 1 | chunk 2 | chunk 3 | ...          chunks of 4 MiB
    folder 0   chunk 0 | chunk 2 | ...
    folder 1   chunk 1 | chunk 3 | ...

A transfer of a few chunks keeps all disks busy. Rejected: a folder per row, where one update reads from one disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from zeroshard.errors import SpillError
from zeroshard.nvme.spill import SpillFile
from zeroshard.nvme.transfers import PATIENCE_S, DiskStalled, FileEnded, Transfer, Transfers

Timed = Callable[[], AbstractContextManager[None]]
CHUNK = 4 << 20
"""Bytes that lie together on one disk: a multiple of every request, and few enough that a row of state spans disks."""


@dataclass(frozen=True)
class _Part:
    """Some of a transfer's bytes, in one file."""

    file: SpillFile
    offset: int
    address: int
    nbytes: int


class Pending:
    """Transfers under way. `wait` may be called several times, and gives the same outcome."""

    def __init__(
        self, begun: Sequence[tuple[Transfer, SpillFile, bool]], patience: float, timed: Timed | None = None
    ) -> None:
        self._begun, self._patience, self._timed = list(begun), patience, timed
        self._error: SpillError | None = None

    def wait(self) -> None:
        """Return when all bytes have moved. Raises SpillError, which names the file; then all have ended or stalled."""
        begun, self._begun = self._begun, []
        if begun and self._timed is not None:
            with self._timed():
                self._wait(begun)
        else:
            self._wait(begun)
        if self._error is not None:
            raise self._error

    def _wait(self, begun: Sequence[tuple[Transfer, SpillFile, bool]]) -> None:
        for transfer, file, write in begun:
            try:
                transfer.wait(self._patience)
            except OSError as error:
                self._error = self._error or spill_error(file, error, write=write)


class Volume:
    """Bytes on disk, from 0 to `nbytes`.

    Args:
        files: one per folder.
        transfers: moves the bytes.
        patience: seconds after which a disk that does not answer is taken for stalled.

    Attributes:
        timed: makes a context around each wait for the disk, on whatever thread; None if nothing times them.
    """

    def __init__(self, files: Sequence[SpillFile], transfers: Transfers, patience: float = PATIENCE_S) -> None:
        self._files, self._transfers, self._patience = list(files), transfers, patience
        self.timed: Timed | None = None

    @property
    def name(self) -> str:
        """How bytes are moved, and where."""
        return f"{self._transfers.name}, in {', '.join(file.folder for file in self._files)}"

    def reserve(self, nbytes: int) -> None:
        """Have so many bytes in all. Raises PlanError where a disk has not."""
        for file in self._files:
            file.reserve(nbytes_per_file(nbytes, len(self._files)))

    def start(self, *, write: bool, at: int, address: int, nbytes: int) -> Pending:
        """Move bytes from `at` on; all of it multiples of a block. Raises SpillError where nothing can be started."""
        begun: list[tuple[Transfer, SpillFile, bool]] = []
        for part in self._parts(at, address, nbytes):
            try:
                transfer = self._transfers.start(
                    write=write,
                    file=part.file.descriptor,
                    offset=part.offset,
                    address=part.address,
                    nbytes=part.nbytes,
                )
            except OSError as error:
                raise spill_error(part.file, error, write=write) from error
            begun.append((transfer, part.file, write))
        return Pending(begun, self._patience, self.timed)

    def close(self) -> None:
        """Wait for what is under way and give the space back."""
        self._transfers.close()
        for file in self._files:
            file.close()

    def _parts(self, at: int, address: int, nbytes: int) -> Iterator[_Part]:
        if len(self._files) == 1:
            yield _Part(self._files[0], at, address, nbytes)
            return
        done = 0
        while done < nbytes:
            number, within = divmod(at + done, CHUNK)
            length = min(CHUNK - within, nbytes - done)
            row, disk = divmod(number, len(self._files))
            yield _Part(self._files[disk], row * CHUNK + within, address + done, length)
            done += length


def nbytes_per_file(nbytes: int, files: int) -> int:
    """Bytes of each of so many files that hold `nbytes` together."""
    if files == 1:
        return nbytes
    chunks = -(-nbytes // CHUNK)
    return -(-chunks // files) * CHUNK


def spill_error(file: SpillFile, error: OSError, *, write: bool) -> SpillError:
    """The error for the user of what the system said of a file."""
    if isinstance(error, DiskStalled):
        what = f"did not finish: {error.strerror}; the disk has stalled"
    elif isinstance(error, FileEnded):
        what = "found less than was written there: the disk was changed below the run"
    else:
        what = f"failed: {error.strerror} (errno {error.errno})"
    found = SpillError(
        f"state on disk: rank {file.rank}: {'a write to' if write else 'a read of'} its file in {file.folder} {what}. "
        "The step can't be finished and the state is lost; look at the disk, then go on from the last checkpoint"
    )
    found.__cause__ = error
    return found
