"""How long stages wait in the schedules of torch, where a forward and either kind of gradients take one tick each.

The order is that which torch executes; an action begins when its stage is free and what it needs has come.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed import pipelining

STAGES, MICRO = 8, 32
_NEEDS = {"FORWARD": ("FORWARD", -1), "BACKWARD_INPUT": ("BACKWARD_INPUT", 1), "FULL_BACKWARD": ("BACKWARD_INPUT", 1)}
Order = dict[int, list[Any]]
Done = dict[tuple[str, int, int], float]


def _order(kind: str, chunks: int) -> tuple[Order, int]:
    """The actions of each rank, and the number of parts of the model."""
    parts = STAGES * chunks
    stages = [
        SimpleNamespace(
            group_size=STAGES, group_rank=0, num_stages=parts, stage_index=part, submod=nn.Identity(), is_first=not part
        )
        for part in range(chunks)
    ]
    return getattr(pipelining, kind)(stages, MICRO).pipeline_order, parts


def _end(action: Any, parts: int, free: float, done: Done) -> float | None:
    """When an action ends on a stage that is free from then on; None where what it needs has not been computed yet."""
    name, part, micro = action.computation_type.name, action.stage_index, action.microbatch_index
    needed, step = _NEEDS.get(name, ("", 0))
    begin = free
    if step and 0 <= part + step < parts:
        if (needed, part + step, micro) not in done:
            return None
        begin = max(free, done[needed, part + step, micro])
    both = name == "FULL_BACKWARD"
    end = begin + (2 if both else 1)
    done["BACKWARD_INPUT" if both else name, part, micro] = end
    return end


def _bubble(kind: str, chunks: int) -> float:
    """The share of the ranks' time in which they wait."""
    order, parts = _order(kind, chunks)
    left = {rank: [action for action in actions if action is not None] for rank, actions in order.items()}
    free, done = dict.fromkeys(left, 0.0), Done()
    while any(left.values()):
        before = sum(map(len, left.values()))
        for rank, actions in left.items():
            while actions and (end := _end(actions[0], parts, free[rank], done)) is not None:
                free[rank] = end
                actions.pop(0)
        assert sum(map(len, left.values())) < before, "an order that waits for itself"
    work = 3 * MICRO * chunks
    return 1 - work / max(free.values())


def test_with_the_v_stages_wait_for_the_first_forwards_alone() -> None:
    fill = STAGES - 1  # forwards of half a stage, after which the last stage can begin: no order has less
    least = fill / (3 * MICRO * 2 + fill)
    assert _bubble("ScheduleZBVZeroBubble", 2) == pytest.approx(least)
    assert least < _bubble("ScheduleInterleavedZeroBubble", 1) < _bubble("ScheduleInterleaved1F1B", 2) < 0.1
