"""The order in which the ranks of a pipeline run forwards and backwards, known before any of them runs.

    1f1b over 2 stages, 3 micro-batches      rank 0   F0 F1 B0 F2 B1 B2
                                             rank 1   F0 B0 F1 B1 F2 B2

Orders of schedules with several chunks are asked of torch's own schedules, which execute them. Its GPipe and 1F1B are
loops without a list; theirs is written down here. Rejected: formulas for the time that stages wait. They know neither
stages that differ nor what is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import SimpleNamespace

from torch import nn

from zeroshard.pipeline.schedules import Shape, kind_of


class Work(str, Enum):
    """What a rank computes at once, by torch's names."""

    FORWARD = "FORWARD"
    BACKWARD = "FULL_BACKWARD"
    INPUTS = "BACKWARD_INPUT"
    """Gradients of a part's inputs alone, which the part before waits for."""
    WEIGHTS = "BACKWARD_WEIGHT"


@dataclass(frozen=True)
class Action:
    """One micro-batch in one part of the model."""

    work: Work
    part: int
    micro: int


Order = Mapping[int, Sequence[Action]]
"""By rank, what it does one after the other."""


@cache
def order_of(name: str, shape: Shape) -> Order:
    """The order of a schedule that runs this pipeline (see `schedules.chosen`)."""
    kind = kind_of(name)
    if not kind.listed:
        return {rank: _alternating(name == "gpipe", rank, shape) for rank in range(shape.stages)}
    from torch.distributed import pipelining

    parts = shape.stages * shape.chunks
    stages = [
        SimpleNamespace(
            group_size=shape.stages,
            group_rank=0,
            num_stages=parts,
            stage_index=part,
            submod=nn.Identity(),
            is_first=part == 0,
        )
        for part in range(shape.chunks)
    ]
    made = getattr(pipelining, kind.kind)(stages, shape.micro_batches)
    return {
        rank: [
            Action(Work(action.computation_type.name), action.stage_index, action.microbatch_index)
            for action in actions
            if action is not None
        ]
        for rank, actions in made.pipeline_order.items()
    }


def _alternating(forwards_first: bool, stage: int, shape: Shape) -> list[Action]:
    """Forwards until the first gradient can be there, then a backward and a forward in turn, then backwards."""
    count = shape.micro_batches
    ahead = count if forwards_first else min(count, shape.stages - stage)
    found = [Action(Work.FORWARD, stage, micro) for micro in range(ahead)]
    for micro in range(count):
        found.append(Action(Work.BACKWARD, stage, micro))
        if micro + ahead < count:
            found.append(Action(Work.FORWARD, stage, micro + ahead))
    return found
