"""Chooses the backend of a process's host kernels, once, when the optimizer is built, and says why.

Native code exists if there was a C++ compiler when zeroshard was installed; nothing is compiled later. Otherwise the
PyTorch twin gives the same bits, more slowly, with a warning.
"""

from __future__ import annotations

import warnings

import torch

from zeroshard.errors import ZeroShardWarning
from zeroshard.optim.host.kernel import HostKernel
from zeroshard.optim.host.native import NativeBackend, load_library
from zeroshard.optim.host.torch_twin import TorchTwin
from zeroshard.plan.offload import ENOUGH_THREADS


def host_kernel(threads: int | None = None) -> HostKernel:
    """The kernel for this process, with a ZeroShardWarning if it is the twin.

    Args:
        threads: its number of threads; torch's number (OMP_NUM_THREADS, which `zeroshard run` sets) if None.
    """
    kernel = available_kernel(threads)
    if isinstance(kernel.backend, TorchTwin):
        warnings.warn(
            "the optimizer's step on the host runs in PyTorch, about eight times slower than native code: "
            f"{kernel.reason}",
            ZeroShardWarning,
            stacklevel=2,
        )
    return kernel


def available_kernel(threads: int | None = None) -> HostKernel:
    """As `host_kernel` without the warning, for reports; printed it shows backend, threads and reason."""
    count = max(1, torch.get_num_threads() if threads is None else threads)
    library, reason = load_library()
    return HostKernel(TorchTwin() if library is None else NativeBackend(library), count, reason)


def processor_keeps_up() -> bool:
    """Whether this rank's CPU threads update state in host memory faster than a GPU, which needs copies both ways.

    Depends on what is installed and on the rank's number of threads, never on a time measurement: the two ways round
    differently, and a resumed run must use the same way again.
    """
    library, _ = load_library()
    return library is not None and torch.get_num_threads() >= ENOUGH_THREADS
