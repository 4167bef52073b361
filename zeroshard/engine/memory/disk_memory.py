"""Opens the files for training state on disk, in the plan's folders and sizes; on all ranks or on none.

A folder may be unusable on one machine only, so the ranks exchange the result before they continue. Rejected: letting
the other ranks notice in the first collective, where a full disk would look like a lost rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroshard.checkpoint.error_barrier import CollectiveBarrier
from zeroshard.comm.collectives import Collectives
from zeroshard.errors import PlanError
from zeroshard.nvme.memory import NvmeMemory
from zeroshard.plan.offload import disk_nbytes
from zeroshard.plan.placement import Tier
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import HostUpdate


def rests_on_disk(plan: Plan) -> bool:
    """Whether a plan keeps any parameters or state there."""
    return any(
        one is not None and one.tier is Tier.NVME
        for _, group in plan.groups()
        for one in (group.param, group.master, group.moments)
    )


def open_disk_memory(plan: Plan, rank: int) -> NvmeMemory:
    """The files of this rank, their space reserved.

    Raises:
        PlanError: a folder can't be used, or the plan has the device update what is there.
    """
    assert plan.policy.spill is not None
    # Codes are streamed through the same windows of host memory; groups beside them that are too small for codes too.
    if HostUpdate.STREAMED in plan.updates and not any(group.in_codes for _, group in plan.groups()):
        raise PlanError(
            "offload: parameters and state on disk are updated by the processor, in windows of host memory; "
            "leave Offload.update open, or set it to HostUpdate.PROCESSOR"
        )
    return NvmeMemory(plan.policy.spill, rank, disk_nbytes(plan))


def open_on_all_ranks(open_memory: Callable[[], NvmeMemory], control: Collectives, device: torch.device) -> NvmeMemory:
    """Call `open_memory` on all ranks. Raises PlanError on all of them, with the first rank's reason, if one fails."""
    problem, memory = None, None
    try:
        memory = open_memory()
    except PlanError as error:
        problem = error
    failed = CollectiveBarrier(control, device).first_failure(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    assert memory is not None
    if failed is not None:
        memory.close()
        raise PlanError(failed.problem)
    return memory
