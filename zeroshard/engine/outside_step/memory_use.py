"""Reports the memory that this process uses now: DeepSpeed's see_memory_usage and memory_status.

The numbers of a GPU come from torch's allocator, without a wait; those of the host from /proc. The memory that a plan
will need is computed by plan.memory.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_LOGGER = logging.getLogger("zeroshard")
GIB = 2**30


@dataclass(frozen=True)
class MemoryUse:
    """Bytes. Those of the device are 0 where there is no GPU.

    Attributes:
        allocated, peak_allocated: device memory in tensors now, and at most since the last reset.
        reserved, peak_reserved: device memory that the allocator holds.
        resident: host memory of this process; 0 where the system does not tell.
        host_used, host_total: host memory of the machine.
    """

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    resident: int
    host_used: int
    host_total: int

    def __str__(self) -> str:
        device = (
            f"allocated {self.allocated / GIB:.2f} GiB (peak {self.peak_allocated / GIB:.2f}), "
            f"reserved {self.reserved / GIB:.2f} GiB (peak {self.peak_reserved / GIB:.2f}), "
        )
        share = f" of {self.host_total / GIB:.1f}" if self.host_total else ""
        return (
            f"{device if torch.cuda.is_available() else ''}process {self.resident / GIB:.2f} GiB, "
            f"host {self.host_used / GIB:.1f}{share} GiB"
        )


def memory_use() -> MemoryUse:
    """The memory in use now."""
    device = (0, 0, 0, 0)
    if torch.cuda.is_available():
        device = (
            torch.cuda.memory_allocated(),
            torch.cuda.max_memory_allocated(),
            torch.cuda.memory_reserved(),
            torch.cuda.max_memory_reserved(),
        )
    total, free = _proc_bytes("/proc/meminfo", "MemTotal:"), _proc_bytes("/proc/meminfo", "MemAvailable:")
    return MemoryUse(*device, _proc_bytes("/proc/self/status", "VmRSS:"), total - free, total)


def see_memory_usage(message: str, force: bool = False) -> MemoryUse | None:
    """Log on rank 0 what memory is in use, and start the device's peaks anew.

    Args:
        force: without it nothing is done, as in DeepSpeed, so that calls can stay in the code.

    Returns:
        What was logged; None on other ranks and without `force`.
    """
    if not force or _rank() != 0:
        return None
    use = memory_use()
    _LOGGER.info("%s: %s", message, use)
    _reset_peaks()
    return use


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> MemoryUse | None:
    """Log what memory is in use, on one rank or (-1) on all.

    Args:
        reset_max: start the device's peaks anew first.
    """
    if print_rank not in (-1, _rank()):
        return None
    if reset_max:
        _reset_peaks()
    use = memory_use()
    _LOGGER.info("rank %d, %s: %s", _rank(), msg, use)
    return use


def _reset_peaks() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _proc_bytes(path: str, field: str) -> int:
    """A field of a /proc file in bytes; 0 where there is none."""
    file = Path(path)
    if not file.exists():
        return 0
    for line in file.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0
