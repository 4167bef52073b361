"""deepspeed.comm: torch.distributed, and `init_distributed`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import zeroshard
from deepspeed._exports import lazy
from zeroshard.errors import UsageError

_SAME = (
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_global_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)

__getattr__, __dir__ = lazy(
    __name__, {**{name: f"torch.distributed:{name}" for name in _SAME}, "log_summary": "zeroshard:log_summary"}
)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make torch's default process group, unless there is one; see `zeroshard.init_distributed`.

    Raises:
        UsageError: accelerate asks for a group without a backend on a machine without a GPU. It would take every rank
            for the only one, and all would train on the same samples.
    """
    by_accelerate = not auto_mpi_discovery and dist_backend is None and not dist.is_initialized()
    if by_accelerate and not torch.cuda.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "accelerate named no backend for several ranks without a GPU, and would take each for the only one: say "
            "TrainingArguments(use_cpu=True), or Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend='gloo')])"
        )
    zeroshard.init_distributed(
        dist_backend=dist_backend,
        auto_mpi_discovery=auto_mpi_discovery,
        distributed_port=distributed_port,
        verbose=verbose,
        timeout=timeout,
        init_method=init_method,
        dist_init_required=dist_init_required,
        rank=rank,
        world_size=world_size,
    )


def get_world_group() -> dist.ProcessGroup | None:
    """The group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """The global ranks of a group, of all where it is None."""
    return dist.get_process_group_ranks(group)


def inference_all_reduce(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> Any:
    """As torch's all_reduce."""
    return dist.all_reduce(tensor, op, group)


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Waits:
    """Gather several tensors, each into one that holds every rank's after the others."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return Waits.of([dist.all_gather_into_tensor(out, own, group, async_op) for out, own in pairs])


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Waits:
    """Reduce several tensors, each in place."""
    return Waits.of([dist.all_reduce(tensor, op, group, async_op) for tensor in tensors])


class Waits(list[dist.Work]):
    """What several operations left to wait for; empty where they are done."""

    @classmethod
    def of(cls, works: Sequence[dist.Work | None]) -> Waits:
        return cls(work for work in works if work is not None)

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self:
            work.wait()


def get_local_rank() -> int:
    """This rank's number on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))
