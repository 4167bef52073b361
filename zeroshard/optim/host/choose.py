"""Which backend a process's optimizer gets: decided once, when the optimizer is built, and told in words.

Native code is there if a C++ compiler was when zeroshard was installed; nothing is compiled later. Without it the
PyTorch twin gives the same bits, more slowly, and one warning says so.
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
        threads: what it takes; torch's number (OMP_NUM_THREADS, which `zeroshard run` sets) if None.
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
    """The same without the warning, for reports: it prints as backend, threads and reason."""
    count = max(1, torch.get_num_threads() if threads is None else threads)
    library, reason = load_library()
    return HostKernel(TorchTwin() if library is None else NativeBackend(library), count, reason)


def processor_keeps_up() -> bool:
    """Whether this rank's processors update state in host memory faster than a GPU to which it has to be carried.

    Told from what is installed and how many threads the rank has, never by the clock: whoever updates decides on
    roundings, and a run that goes on must go on in the same way.
    """
    library, _ = load_library()
    return library is not None and torch.get_num_threads() >= ENOUGH_THREADS
