"""Raises an error for parameters without a gradient, if `zero_optimization.ignore_unused_parameters` is false.

All ranks compare before the step, so that all raise the same error. Rejected: a check on each rank alone; ranks without
a missing gradient would go on to the step's collectives and wait there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeroshard.engine.core.handle import Handle
from zeroshard.errors import UsageError

_SHOWN = 5


def refuse_unused(handle: Handle) -> None:
    """Called by all ranks after the last backward of a step.

    Raises:
        UsageError: some parameters got no gradient since the last step on some rank; it names the first of them.
    """
    runtime, control = handle.runtime, handle.comm.control
    names: list[str] = []
    flags: list[bool] = []
    for unit in runtime.units:
        for group, received in zip(unit.trainable, runtime.gradients.received(unit), strict=True):
            names += [segment.name for segment in group.plan.layout.segments]
            flags += received
    missing = torch.tensor([0 if flag else control.size - control.rank for flag in flags], device=handle.device)
    control.wait(control.all_reduce(missing, "(unused parameters)", op=dist.ReduceOp.MAX))
    found = [(name, control.size - behind) for name, behind in zip(names, missing.tolist(), strict=True) if behind]
    if not found:
        return
    shown = ", ".join(f"{name!r} (rank {rank})" for name, rank in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise UsageError(
        f"step(): no gradient came since the last step for {shown}{more}, and "
        "zero_optimization.ignore_unused_parameters is false. Use them in the loss, freeze them (requires_grad=False), "
        "or set the key to true, which leaves them as they are"
    )
