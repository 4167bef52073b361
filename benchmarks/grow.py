"""Fills host memory once and gives it back, on machines whose memory grows as it is used.

    python -m benchmarks.grow GIB

Some virtual machines begin with a part of their memory, and the system says there is no more until it is used. An
engine that looks before it takes its memory refuses then what the machine would give. This is a process of its own, so
that peaks of the process that trains are its own.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
import time

import torch

PIECE = 4 << 30


def grow(nbytes: int, timeout: float) -> bool:
    """Fill and give back `nbytes` in another process; False if that ended early or took more than `timeout` seconds."""
    command = [sys.executable, "-m", "benchmarks.grow", str(nbytes / 2**30)]
    try:
        return subprocess.run(command, timeout=timeout).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def fill(nbytes: int) -> None:
    """Fill so many bytes, piece by piece, and hold them until all are filled."""
    held: list[torch.Tensor] = []
    began = time.monotonic()
    for at in range(0, nbytes, PIECE):
        mapping = mmap.mmap(-1, min(PIECE, nbytes - at), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        held.append(torch.frombuffer(mapping, dtype=torch.uint8).fill_(1))
        if at // PIECE % 8 == 7:
            print(f"    {(at + PIECE) / 2**30:.0f} GiB filled in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    fill(int(float(sys.argv[1]) * 2**30))
