"""Finds out whether this rank's main thread is in a collective of torch.distributed that user code called.

    rank 0    model.generate(...)    waits for the all-gather of unit X, which needs rank 1
    rank 1    dist.barrier()         waits for rank 0                              both wait forever

The operation logs can't tell this from a slow rank, because they do not contain the barrier. So the watchdog thread
looks at the stack frames of the main thread. Only collectives over all ranks count that every rank must enter; the
receiver of a broadcast waits for the source only. Rejected: wrapping torch's functions, which user code may have
imported by name.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

import torch.distributed as dist
from torch.distributed import distributed_c10d

_NEED_ALL = frozenset(
    {"barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor"}
    | {"all_to_all", "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor"}
)
_FILE = distributed_c10d.__file__
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


def user_collective() -> str | None:
    """'torch.distributed.barrier (train.py:12)' if the main thread is in such a call just now."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            break  # the collective was called by zeroshard, or by a user function that zeroshard called
        if code.co_filename == _FILE and code.co_name in _NEED_ALL and _of_all_ranks(frame):
            found = frame
        frame = frame.f_back
    caller = None if found is None else _caller(found)
    if found is None or caller is None or caller.f_code.co_filename.startswith(_OURS):
        return None
    return f"torch.distributed.{found.f_code.co_name} ({os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno})"


def _of_all_ranks(frame: FrameType) -> bool:
    group = frame.f_locals.get("group")
    return group is None or group is dist.group.WORLD


def _caller(frame: FrameType) -> FrameType:
    """The frame from which torch was called."""
    torch_folder = os.path.dirname(os.path.dirname(_FILE)) + os.sep
    caller = frame
    while caller.f_back is not None and caller.f_code.co_filename.startswith(torch_folder):
        caller = caller.f_back
    return caller
