"""Process groups: there is the data-parallel one."""

from __future__ import annotations

import torch.distributed as dist

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {})


def _get_data_parallel_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    return dist.get_world_size()


def _get_data_parallel_rank() -> int:
    return dist.get_rank()
