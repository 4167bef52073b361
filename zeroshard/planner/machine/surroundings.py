"""What `zeroshard doctor` says of a machine unmeasured: versions, and settings that slow a run or hide errors.

    variables    of CUDA, NCCL and torch that are set to what nobody wants in a long run
    limits       of this process and its control group: locked memory, open files, processors
    system       shared memory, swap, the clock

Each note says what is set, what it does, and what to do. A machine that is set up well has none. Rejected: to refuse to
train; every one of these settings is right for somebody who looks for a fault.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from torch.cuda import nccl

GIB = 2**30
_LEAST_SHARED, _LEAST_LOCKED, _LEAST_FILES, _MOST_SWAPPED = GIB, 64 << 20, 4096, GIB
_CLOCK_ERROR = 5
"""What adjtimex of Linux returns where no source sets the clock."""


def _is(*values: str) -> Callable[[str], bool]:
    return lambda given: given.strip().upper() in values


_ON, _OFF = _is("1", "TRUE", "ON", "YES"), _is("0", "FALSE", "OFF", "NO")
_VARIABLES: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "CUDA_LAUNCH_BLOCKING": (_ON, "the host waits for every kernel; unset it except to find an illegal access"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_ON, "every tensor is allocated by the driver, which waits for the device"),
    "NCCL_P2P_DISABLE": (_ON, "GPUs of a node send through host memory instead of NVLink or PCIe"),
    "NCCL_SHM_DISABLE": (_ON, "GPUs of a node without P2P send through the network"),
    "NCCL_IB_DISABLE": (_ON, "nodes send through TCP, though there may be InfiniBand or RoCE"),
    "NCCL_DEBUG": (_is("TRACE"), "every call of NCCL is written; INFO or WARN say enough"),
    "TORCH_DISTRIBUTED_DEBUG": (_is("DETAIL"), "each collective is preceded by others that compare it"),
    "TORCH_NCCL_BLOCKING_WAIT": (_ON, "the host waits for each collective"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (_OFF, "a failed collective hangs and ends nothing"),
    "NCCL_ASYNC_ERROR_HANDLING": (_OFF, "a failed collective hangs and ends nothing"),
    "TORCH_NCCL_ENABLE_MONITORING": (_OFF, "a hang inside of NCCL ends nothing"),
}


def versions() -> str:
    """What is installed here, in one line."""
    found = [f"zeroshard {version('zeroshard')}", f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    if torch.cuda.is_available():
        found.append(f"CUDA {torch.version.cuda}")
        if torch.distributed.is_nccl_available():
            found.append(f"NCCL {'.'.join(map(str, nccl.version()))}")
    return ", ".join([*found, f"{platform.system()} {platform.release()}"])


def notes(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """What slows a run on this machine or hides its errors, in sentences."""
    for name, (matches, effect) in _VARIABLES.items():
        if name in environment and matches(environment[name]):
            yield f"{name}={environment[name]}: {effect}"
    yield from limit_notes(
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    )
    yield from processor_notes(_read("/sys/fs/cgroup/cpu.max"), os.cpu_count() or 1)
    shared = Path("/dev/shm")
    if shared.exists():
        yield from shared_memory_notes(shutil.disk_usage(shared).total)
    yield from swap_notes(_read("/proc/meminfo"))
    if not clock_is_set():
        yield "no time source sets the clock (NTP): logs of several nodes can't be put in order; start chrony or ntpd"


def limit_notes(locked: int, files: int) -> Iterator[str]:
    """Of the limits for locked memory, in bytes, and for open files."""
    if 0 <= locked < _LEAST_LOCKED:
        yield (
            f"locked memory is limited to {locked >> 10} KiB (ulimit -l): InfiniBand and pinned memory need more; "
            "set it to unlimited"
        )
    if 0 <= files < _LEAST_FILES:
        yield f"open files are limited to {files} (ulimit -n): ranks, loaders and checkpoints may need more"


def processor_notes(quota: str, cores: int) -> Iterator[str]:
    """Of the content of a control group's cpu.max."""
    allowed, _, period = quota.strip().partition(" ")
    if allowed.isdigit() and period.isdigit() and int(allowed) < cores * int(period):
        share = int(allowed) / int(period)
        yield (
            f"the control group allows {share:g} processors, though {cores} are seen: threads beyond that are stopped "
            "for a while; set OMP_NUM_THREADS, or raise the limit of the container"
        )


def shared_memory_notes(nbytes: int) -> Iterator[str]:
    """Of the size of /dev/shm."""
    if nbytes < _LEAST_SHARED:
        yield (
            f"/dev/shm has {nbytes >> 20} MiB: workers of data loaders and NCCL need more; start a container with "
            "--shm-size or --ipc=host"
        )


def swap_notes(meminfo: str) -> Iterator[str]:
    """Of the content of /proc/meminfo."""
    sizes = {line.partition(":")[0]: line.split()[1] for line in meminfo.splitlines() if ":" in line}
    used = (int(sizes.get("SwapTotal", "0")) - int(sizes.get("SwapFree", "0"))) << 10
    if used > _MOST_SWAPPED:
        yield f"{used / GIB:.1f} GiB are swapped out: state in host memory may wait for the disk"


def clock_is_set() -> bool:
    """Whether a source sets the clock; true where the system does not tell."""
    if sys.platform != "linux":
        return True
    told = (ctypes.c_char * 512)()  # struct timex, larger than any; its first field, 0, asks for nothing to be set
    try:
        state = ctypes.CDLL(None).adjtimex(told)
    except (OSError, AttributeError):
        return True
    return state != _CLOCK_ERROR


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
