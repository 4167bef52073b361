"""torch's schedules by name, and what each of them asks of a pipeline.

    gpipe                    all forwards, then all backwards
    1f1b                     a forward and a backward in turn: as few micro-batches wait as there are stages
    interleaved_1f1b         the same over several chunks on each stage
    looped_bfs               each chunk with all micro-batches before the next: a unit is gathered once for all of them

Looped breadth-first is from Lamy-Poirier 2022 (arXiv:2211.05953). What runs is `torch.distributed.pipelining`, which is
imported here alone, for it takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.errors import UsageError


@dataclass(frozen=True)
class _Kind:
    """A schedule of torch.

    Attributes:
        kind: its class's name.
        several: whether it takes several chunks on each stage, as a list.
    """

    kind: str
    several: bool


_KINDS = {
    "gpipe": _Kind("ScheduleGPipe", False),
    "1f1b": _Kind("Schedule1F1B", False),
    "interleaved_1f1b": _Kind("ScheduleInterleaved1F1B", True),
    "looped_bfs": _Kind("ScheduleLoopedBFS", True),
}
SCHEDULES = tuple(_KINDS)


@dataclass(frozen=True)
class Shape:
    """What of a pipeline decides which schedules run it."""

    stages: int
    chunks: int
    placement: str
    micro_batches: int


def chosen(asked: str, shape: Shape) -> str:
    """The schedule of a name; "auto" is 1F1B, interleaved where stages have several chunks.

    Raises:
        UsageError: it can't run this pipeline.
    """
    name = asked
    if asked == "auto":
        name = "1f1b" if shape.chunks == 1 else "interleaved_1f1b"
    kind = _KINDS[name]
    if shape.chunks > 1 and not kind.several:
        raise UsageError(
            f"pipeline.schedule {name!r} runs one chunk per stage, and this PipelineModule has {shape.chunks}; use "
            f"{_named(several=True)}, or chunks=1"
        )
    if shape.chunks == 1 and kind.several:
        raise UsageError(
            f"pipeline.schedule {name!r} runs several chunks per stage, and this PipelineModule has one; build it with "
            f"PipelineModule(..., chunks=2), or use {_named(several=False)}"
        )
    if shape.placement == "v":
        raise UsageError(
            f"pipeline.schedule {name!r} runs chunks that are placed in a loop, and this PipelineModule places them as "
            "a 'v', for zero-bubble schedules, which are not built; use placement='loop'"
        )
    if name == "interleaved_1f1b":
        _check_rounds(name, shape)
    return name


def _check_rounds(name: str, shape: Shape) -> None:
    count, stages = shape.micro_batches, shape.stages
    rounds = max(1, count // stages)
    if count % rounds:
        raise UsageError(
            f"pipeline.schedule {name!r} takes micro-batches in rounds of {stages} stages: {count} micro-batches "
            f"(gradient_accumulation_steps) don't divide into {rounds} rounds; use a multiple of {stages}"
        )


def _named(*, several: bool) -> str:
    return " or ".join(repr(name) for name, kind in _KINDS.items() if kind.several is several)


def make_schedule(
    name: str,
    chunks: Sequence[nn.Module],
    numbers: Sequence[int],
    total: int,
    micro_batches: int,
    shapes: Sequence[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]],
    device: torch.device,
    group: dist.ProcessGroup,
    loss_fn: Callable[..., Any] | None,
) -> Any:
    """The schedule over this rank's chunks.

    Args:
        numbers: those of the chunks in the whole model, of `total`.
        shapes: of each chunk's inputs and outputs, as tensors on the meta device.
        loss_fn: None for forwards alone.
    """
    from torch.distributed import pipelining

    stages = [
        pipelining.PipelineStage(chunk, number, total, device, input_args=inputs, output_args=outputs, group=group)
        for chunk, number, (inputs, outputs) in zip(chunks, numbers, shapes, strict=True)
    ]
    kind = _KINDS[name]
    made = getattr(pipelining, kind.kind)
    # Gradients are in the engine's buffers, and the loss is divided before its backward.
    return made(stages if kind.several else stages[0], micro_batches, loss_fn=loss_fn, scale_grads=False)
