"""Gives each rank CPU cores of its own: torch's NUMA binding on GPU hosts with numactl, else equal shares of the cores.

    cores 0-7, a thread of each          4 ranks: 0 1 | 2 3 | 4 5 | 6 7

torch gives a rank cores on the NUMA node of its GPU, but supports neither a list of cores nor a host without GPUs, and
needs numactl. The shares are affinity masks, set in each rank before its script starts (runner.py). Linux allocates a
page on the NUMA node of the core that first writes it, and numbers the cores of a NUMA node consecutively.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from torch.numa.binding import AffinityMode, NumaOptions

from zeroshard.errors import UsageError
from zeroshard.launch.job import Job
from zeroshard.launch.resources import gpu_count, set_threads
from zeroshard.launch.runner import CORES_VARIABLE

_CPUS = Path("/sys/devices/system/cpu")


def numa_options(job: Job) -> NumaOptions | None:
    """Options with which torch's agent binds the ranks; None if it can't, or must not."""
    if not job.bind_cores or job.core_list is not None or not gpu_count() or shutil.which("numactl") is None:
        return None
    return NumaOptions(AffinityMode.EXCLUSIVE, should_fall_back_if_binding_fails=True)  # it logs why


def bind_ranks(job: Job, nproc: int, environ: MutableMapping[str, str]) -> str:
    """Put the ranks' cores and number of threads into `environ`; returns a description for the user.

    Raises:
        UsageError: a core does not exist or may not be used by this process, or there are fewer cores than ranks.
    """
    if not job.bind_cores:
        return set_threads(nproc, environ)
    if numa_options(job) is not None:
        return f"bound to cores near their GPUs, {set_threads(nproc, environ)}"
    usable = os.sched_getaffinity(0)
    wanted = parse_cores(job.core_list) if job.core_list is not None else one_thread_per_core(_CPUS, usable)
    for core in sorted(wanted - usable):
        raise UsageError(f"--bind-core-list {job.core_list}: core {core} is not there, or not for this process to use")
    shares = divide(sorted(wanted), nproc)
    environ[CORES_VARIABLE] = json.dumps(shares)
    environ.setdefault("OMP_NUM_THREADS", str(min(map(len, shares))))
    named = ", ".join(",".join(map(str, share)) for share in shares)
    return f"bound to cores {named}, OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}"


def parse_cores(text: str) -> set[int]:
    """The cores of a list like '0-27,56'. Raises UsageError for another form, or a core that is there twice."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise UsageError(f"--bind-core-list {text}: {part!r} is not of the form 3 or 0-27")
        cores += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(cores)) < len(cores):
        raise UsageError(f"--bind-core-list {text}: a core is there twice")
    return set(cores)


def one_thread_per_core(cpus: Path, usable: set[int]) -> set[int]:
    """The first usable hardware thread of each core, since the threads of a core share its arithmetic units."""
    chosen: set[int] = set()
    for cpu in sorted(usable):
        siblings = cpus / f"cpu{cpu}/topology/thread_siblings_list"
        if not siblings.exists() or not parse_cores(siblings.read_text().strip()) & chosen:
            chosen.add(cpu)
    return chosen


def divide(cores: Sequence[int], nproc: int) -> list[Sequence[int]]:
    """Equal shares of the cores, in order. Raises UsageError for fewer cores than ranks."""
    if len(cores) < nproc:
        raise UsageError(
            f"--bind-cores: {nproc} ranks, but {len(cores)} core{'s' if len(cores) != 1 else ''} to divide"
        )
    return [cores[rank * len(cores) // nproc : (rank + 1) * len(cores) // nproc] for rank in range(nproc)]
