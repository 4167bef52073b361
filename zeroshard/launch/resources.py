"""Decides the numbers of ranks and of threads from the cores and GPUs that this process may use.

torchrun always sets OMP_NUM_THREADS=1, with which the CPU optimizer and all CPU kernels are serial. Here the usable
cores are divided among the ranks. Usable cores respect the affinity mask and the container's CPU quota: else a
container with a quota of two cores on a 64-core host would run 64 threads on two cores.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path

from zeroshard.errors import UsageError

MAX_RANKS = 4096
"""The largest number of ranks on one node, so that a typing error does not start too many processes."""
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if _CPU_QUOTA.exists():
        quota, period = _CPU_QUOTA.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def gpu_count() -> int:
    import torch  # seconds: only once the command needs it

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def resolve_nproc(text: str, count_gpus: Callable[[], int] = gpu_count) -> int:
    """Ranks on this node from `--nproc`: a number, `gpu`, `cpu`, or `auto` (GPUs if there are any, else cores).

    Raises:
        UsageError: another text, or more ranks than the node has GPUs, if it has any.
    """
    if text == "cpu":
        return usable_cores()
    if text in ("gpu", "auto"):
        gpus = count_gpus()
        if not gpus and text == "gpu":
            raise UsageError("--nproc gpu: torch sees no GPU on this node; give a number to train on CPU")
        return gpus or usable_cores()
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_RANKS:
        raise UsageError(f"--nproc {text}: expected a number from 1 to {MAX_RANKS}, or auto, gpu or cpu")
    nproc, gpus = int(text), count_gpus()
    if 0 < gpus < nproc:
        raise UsageError(
            f"--nproc {nproc}: this node has {gpus} GPU{'s' if gpus > 1 else ''}; "
            "use fewer ranks, or train on CPU with CUDA_VISIBLE_DEVICES= (empty)"
        )
    return nproc


def set_threads(nproc: int, environ: MutableMapping[str, str]) -> str:
    """Set OMP_NUM_THREADS for the ranks unless the user has set it; returns a description for the user."""
    chosen = environ.get("OMP_NUM_THREADS")
    if chosen is not None:
        return f"OMP_NUM_THREADS={chosen}, as set in the environment"
    cores = usable_cores()
    threads = max(1, cores // nproc)
    environ["OMP_NUM_THREADS"] = str(threads)
    return f"OMP_NUM_THREADS={threads} each: {cores} usable core{'s' if cores > 1 else ''} for {nproc}"
