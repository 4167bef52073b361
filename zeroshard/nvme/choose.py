"""Which reader and writer a process gets: the best that is there, decided once, when the files are opened."""

from __future__ import annotations

from collections.abc import Iterator

from zeroshard.nvme.native import RING, THREADS, NativeTransfers, load_library
from zeroshard.nvme.python_twin import ThreadTransfers
from zeroshard.nvme.transfers import Transfers


def best_transfers() -> Transfers:
    """io_uring, else threads of native code, else those of Python. `name` says which."""
    return next(all_transfers())


def all_transfers() -> Iterator[Transfers]:
    """Every one that this machine has, best first; made as they are asked for."""
    library = load_library()
    for kind in (RING, THREADS):
        if library is None:
            break
        try:
            yield NativeTransfers(library, kind)
        except OSError:  # containers often forbid io_uring
            continue
    yield ThreadTransfers()
