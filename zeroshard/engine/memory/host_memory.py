"""Host memory for training state: allocated once, with the size in the plan, and pinned if a device copies from it.

    [ master of unit 0 | moments of unit 0 | gradients of unit 0 | master of unit 1 | ... ]      one mapping

Pages of an anonymous mapping are registered with the driver. A size that the machine does not have is refused before
anything is allocated; otherwise the system would kill some process later. Rejected: torch's pinned allocator, which
rounds every tensor up to a power of two, so that 13 GB take 16.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zeroshard.errors import PlanError, ZeroShardError
from zeroshard.plan.offload import ALIGNMENT, aligned, host_nbytes
from zeroshard.plan.plan import Plan
from zeroshard.tiers import RowInPlace

_KEPT_FREE = 1 << 30
"""Bytes that are left for everything else on the machine."""
_LARGEST_PIECES = 8
"""Tensors of a group at most: master, two moments (of codes and scales each), gradients, and two buffers beside."""


class HostMemory:
    """Takes tensors one after the other from one mapping.

    Args:
        nbytes: bytes of the mapping.
        pinned: lock the pages for copies of the current device.

    A TierMemory (see zeroshard.tiers), whose rows lie in place.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._locks = pinned
        self._locked: list[torch.Tensor] = []
        self.used = self.pinned = 0
        if pinned:
            weakref.finalize(self, _unregister, self._locked)
        self.reserve(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Take another mapping, from which the next tensors come."""
        self._bytes, self._next = _mapping(max(nbytes, ALIGNMENT)), 0
        if self._locks:
            self._bytes.zero_()  # by all threads: registering would bring the pages in one by one
            _register(self._bytes)
            self._locked.append(self._bytes)
            self.pinned += self._bytes.nbytes

    def close(self) -> None:
        """See TierMemory; rows in place live on with their tensors."""

    def allocate(self, numel: int, dtype: torch.dtype) -> RowInPlace:
        """See TierMemory."""
        return RowInPlace(self.zeros(numel, dtype))

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of (numel,) zeros; it lives as long as this memory."""
        start, nbytes = self._next, numel * dtype.itemsize
        assert start + nbytes <= self._bytes.numel(), "the plan counted less host memory than its state takes"
        self._next = min(self._bytes.numel(), start + aligned(nbytes))
        self.used += nbytes
        return self._bytes[start : start + nbytes].view(dtype)


def _mapping(nbytes: int) -> torch.Tensor:
    """Zeros, uint8, of an anonymous mapping; in huge pages where the system has them."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # a kernel without them: only slower
            mapping.madvise(advice)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def open_host_memory(plan: Plan, device: torch.device) -> HostMemory:
    """The host memory that `plan` needs on this rank.

    Raises:
        PlanError: the machine has too little memory.
    """
    groups = sum(group.updated_off_device for _, group in plan.groups())
    nbytes = host_nbytes(plan) + groups * _LARGEST_PIECES * ALIGNMENT
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_host_memory(nbytes, ranks, available_bytes())
    pinned = device.type == "cuda" and plan.policy.pin_memory
    return HostMemory(nbytes, pinned=pinned)


def check_host_memory(nbytes: int, ranks: int, available: int | None) -> None:
    """Raises PlanError where `ranks` processes of this machine can't take `nbytes` each of `available`."""
    if available is None or nbytes * ranks + _KEPT_FREE <= available:
        return
    raise PlanError(
        f"offload: the plan keeps {nbytes / 2**30:.2f} GiB of state in host memory per rank, "
        f"{nbytes * ranks / 2**30:.2f} GiB for the {ranks} on this machine, which has {available / 2**30:.2f} GiB "
        "available; use more ranks or machines, or lower offload_optimizer.ratio (Offload.ratio) if devices have room"
    )


def has_host_memory(nbytes: int, available: int | None) -> bool:
    """Whether each rank of this machine can take so many bytes of `available`."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return available is None or nbytes * ranks + _KEPT_FREE <= available


def available_bytes() -> int | None:
    """Bytes of host memory that can be taken now: the machine's or the container's, whichever is less."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    found = {line.split(":")[0]: line.split()[1] for line in meminfo.read_text().splitlines() if line.count(":")}
    machine = int(found["MemAvailable"]) * 1024 if "MemAvailable" in found else None
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not (limit.exists() and used.exists()):
        return machine
    text = limit.read_text().strip()
    if text == "max":
        return machine
    container = max(0, int(text) - int(used.read_text()))
    return container if machine is None else min(machine, container)


def _register(memory: torch.Tensor) -> None:
    code = int(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise ZeroShardError(
            f"locking {memory.nbytes / 2**30:.2f} GiB of host memory failed (CUDA error {code}): the limit of locked "
            "memory may be too low (ulimit -l), or set offload_optimizer.pin_memory to false"
        )


def _unregister(locked: list[torch.Tensor]) -> None:
    for memory in locked:
        _runtime().cudaHostUnregister(memory.data_ptr())


def _runtime() -> Any:
    """The CUDA runtime that torch has loaded; typed as absent where there is no GPU."""
    return torch.cuda.cudart()
