"""Raw copies on a CUDA stream: what `tensor.copy_` does between contiguous tensors, for a fifth of the host's time.

A unit's gradients go to their owners in a dozen copies, between addresses that were fixed when the plan was made. The
runtime library is the one that torch has loaded. Rejected: one kernel that copies all, which takes processors from the
backward; and compiled code of our own, for one function.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

CopyFunction = Callable[[int, int, int, int], None]
"""copy(target address, source address, bytes, stream handle)"""

_DEVICE_TO_DEVICE = 3


def device_copies(device: torch.device) -> CopyFunction | None:
    """The copy function of the CUDA runtime in this process; None off a GPU, and where it can't be reached."""
    return _runtime_copy() if device.type == "cuda" else None


@cache
def _runtime_copy() -> CopyFunction | None:
    if torch.version.cuda is None:
        return None
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    function = runtime.cudaMemcpyAsync
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    function.restype = ctypes.c_int

    def copy(target: int, source: int, nbytes: int, stream: int) -> None:
        error = function(target, source, nbytes, _DEVICE_TO_DEVICE, stream)
        if error:
            raise RuntimeError(f"cudaMemcpyAsync of {nbytes} bytes failed with CUDA error {error}")

    return copy
