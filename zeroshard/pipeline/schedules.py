"""torch's schedules by name, and what each of them asks of a pipeline.

    gpipe                    all forwards, then all backwards
    1f1b                     a forward and a backward in turn: as few micro-batches wait as there are stages
    interleaved_1f1b         the same over several chunks on each stage
    looped_bfs               each chunk with all micro-batches before the next: a unit is gathered once for all of them
    interleaved_zero_bubble  gradients of inputs go on at once, those of weights fill the bubbles
    zbv_zero_bubble          the same with two chunks per stage, there and back
    vertical                 on a single stage: each layer with all micro-batches before the next (pipeline.vertical)

Looped breadth-first is from Lamy-Poirier 2022 (arXiv:2211.05953), zero bubbles from Qi et al. 2023 (arXiv:2401.10241)
and 2024 (arXiv:2405.15362). What runs is `torch.distributed.pipelining`, which is
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

Collect = Callable[[Sequence[tuple[nn.Parameter, torch.Tensor]]], object]
"""Takes parameters and their gradients."""


@dataclass(frozen=True)
class Kind:
    """A schedule of torch.

    Attributes:
        kind: its class's name.
        least, most: chunks on each stage that it runs.
        placement: how it wants these placed.
        listed: whether it takes the stages as a list, though there is one.
        rounds: whether it takes micro-batches in whole rounds of as many as there are stages.
        splits: whether gradients of inputs and of weights are computed apart.
    """

    kind: str
    least: int = 1
    most: int = 1
    placement: str = "loop"
    listed: bool = True
    rounds: bool = False
    splits: bool = False


VERTICAL = "vertical"
_MANY = 2**31
_FORWARDS = ("FORWARD", "SEND_F", "RECV_F")
"""Names of torch's actions that forwards alone consist of."""
_KINDS = {
    "gpipe": Kind("ScheduleGPipe", listed=False),
    "1f1b": Kind("Schedule1F1B", listed=False),
    "interleaved_1f1b": Kind("ScheduleInterleaved1F1B", 2, _MANY, rounds=True),
    "looped_bfs": Kind("ScheduleLoopedBFS", 2, _MANY),
    "interleaved_zero_bubble": Kind("ScheduleInterleavedZeroBubble", 1, _MANY, rounds=True, splits=True),
    "zbv_zero_bubble": Kind("ScheduleZBVZeroBubble", 2, 2, "v", splits=True),
}


@dataclass(frozen=True)
class Shape:
    """What of a pipeline decides which schedules run it."""

    stages: int
    chunks: int
    placement: str
    micro_batches: int


def kind_of(name: str) -> Kind:
    """What a schedule of this name is."""
    return _KINDS[name]


def splits_backward(name: str) -> bool:
    """Whether a schedule computes gradients of inputs and of weights apart."""
    return name not in ("auto", VERTICAL) and kind_of(name).splits


def chosen(asked: str, shape: Shape) -> str:
    """The schedule of a name; "auto" is the one without splitting backwards that fits.

    Raises:
        UsageError: it can't run this pipeline.
    """
    name = asked
    if asked == VERTICAL:
        if shape.stages > 1:
            raise UsageError(
                f"pipeline.schedule 'vertical' runs one stage, and this PipelineModule has {shape.stages}; use "
                "num_stages=1, or looped_bfs, which lets all micro-batches pass a chunk before the next one"
            )
        return name
    if asked == "auto":
        name = "1f1b" if shape.chunks == 1 else "interleaved_1f1b"
        name = "zbv_zero_bubble" if shape.placement == "v" else name
    if name == "1f1b" and shape.chunks == 1 and shape.micro_batches < shape.stages:
        name = "gpipe"  # torch's 1F1B wants one for each stage; with fewer all forwards come first in both
    kind = _KINDS[name]
    if not kind.least <= shape.chunks <= kind.most:
        wanted = "one chunk" if kind.most == 1 else "two chunks" if kind.most == 2 else "several chunks"
        raise UsageError(
            f"pipeline.schedule {name!r} runs {wanted} per stage, and this PipelineModule has {shape.chunks}; build it "
            f"with PipelineModule(..., chunks={min(kind.most, max(kind.least, 1))}), or use {_that_fit(shape)}"
        )
    if shape.placement != kind.placement and shape.chunks > 1:
        raise UsageError(
            f"pipeline.schedule {name!r} runs chunks placed as {kind.placement!r}, and this PipelineModule has "
            f"placement={shape.placement!r}; change it, or use {_that_fit(shape)}"
        )
    if kind.rounds:
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


def _that_fit(shape: Shape) -> str:
    return " or ".join(
        repr(name)
        for name, kind in _KINDS.items()
        if kind.least <= shape.chunks <= kind.most and (shape.chunks == 1 or kind.placement == shape.placement)
    )


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
    collect: Collect,
) -> Any:
    """The schedule over this rank's chunks.

    Args:
        numbers: those of the chunks in the whole model, of `total`.
        shapes: of each chunk's inputs and outputs, as tensors on the meta device.
        loss_fn: None for forwards alone.
        collect: takes the gradients of weights that are computed apart.
    """
    from torch.distributed import pipelining

    from zeroshard.pipeline.split import stage_class

    kind = _KINDS[name]
    stage = stage_class(collect) if kind.splits else pipelining.PipelineStage
    stages = [
        stage(chunk, number, total, device, input_args=inputs, output_args=outputs, group=group)
        for chunk, number, (inputs, outputs) in zip(chunks, numbers, shapes, strict=True)
    ]
    made = getattr(pipelining, kind.kind)
    # Gradients are in the engine's buffers, and the loss is divided before its backward.
    schedule = made(stages if kind.listed else stages[0], micro_batches, loss_fn=loss_fn, scale_grads=False)
    if loss_fn is None and kind.listed:  # torch would run what belongs to backwards, which are not there
        schedule.pipeline_order_with_comms = {
            rank: [action for action in actions if action.computation_type.name in _FORWARDS]
            for rank, actions in schedule.pipeline_order_with_comms.items()
        }
    return schedule
