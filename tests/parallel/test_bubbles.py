"""How long stages wait in the schedules of torch, on the planner's clocks, and that what ran is the order planned."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.pipeline.layers import LayerSpec
from zeroshard.pipeline.module import PipelineModule
from zeroshard.pipeline.order import Work, order_of
from zeroshard.pipeline.schedules import Shape
from zeroshard.planner.predict.pipeline_clock import PartTime, pipeline_time

STAGES, MICRO = 8, 32
EQUAL = PartTime(1.0, 1.0, 1.0)


def _bubble(name: str, chunks: int, tick: PartTime = EQUAL) -> float:
    """The share of the ranks' time in which they wait, where all parts take as long."""
    shape = Shape(STAGES, chunks, "v" if name == "zbv_zero_bubble" else "loop", MICRO)
    return pipeline_time(order_of(name, shape), [tick] * (STAGES * chunks)).bubble


def test_zero_bubbles_of_three_chunks_wait_three_percent_at_most() -> None:
    assert _bubble("interleaved_zero_bubble", 3) <= 0.03


@pytest.mark.parametrize(
    ("name", "chunks"), [("zbv_zero_bubble", 2), *(("interleaved_zero_bubble", chunks) for chunks in (2, 3, 4))]
)
def test_zero_bubbles_of_several_chunks_wait_for_the_first_forwards_alone(name: str, chunks: int) -> None:
    fill = STAGES - 1  # forwards of one chunk, after which the last stage can begin: no order has less
    assert _bubble(name, chunks) == pytest.approx(fill / (3 * MICRO * chunks + fill))


def test_schedules_wait_as_long_as_is_known_of_them() -> None:
    assert _bubble("1f1b", 1) == pytest.approx((STAGES - 1) / (MICRO + STAGES - 1))
    assert _bubble("gpipe", 1) == pytest.approx(_bubble("1f1b", 1))
    assert _bubble("interleaved_1f1b", 1) == pytest.approx(_bubble("1f1b", 1))
    assert _bubble("interleaved_1f1b", 1) > _bubble("interleaved_1f1b", 2) > _bubble("interleaved_zero_bubble", 1)
    attention = PartTime(1.0, 2.0, 1.0)  # gradients of inputs take longest
    assert _bubble("interleaved_zero_bubble", 4, attention) < 0.03 < _bubble("zbv_zero_bubble", 2, attention)


def test_a_stage_of_1f1b_holds_as_many_micro_batches_as_stages_follow_it() -> None:
    time = pipeline_time(order_of("1f1b", Shape(4, 1, "loop", 8)), [PartTime(1.0, 1.0, 1.0)] * 4)
    assert time.held == (((0, 4),), ((1, 3),), ((2, 2),), ((3, 1),))
    assert pipeline_time(order_of("gpipe", Shape(2, 1, "loop", 8)), [PartTime(1.0, 1.0, 1.0)] * 2).held[1] == ((1, 8),)


def _executed(rank: int, world: int, cases: list[tuple[str, int, str]]) -> None:
    for name, chunks, placement in cases:
        model = PipelineModule(
            [LayerSpec(nn.Linear, 4, 4) for _ in range(world * chunks)],
            num_stages=world,
            loss_fn=F.mse_loss,
            chunks=chunks,
            placement=placement,
            partition_method="uniform",
        )
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2},
            "pipeline": {"schedule": name},
        }
        engine, *_ = zeroshard.initialize(model=model, config=config)
        data = iter([(torch.ones(1, 4), torch.ones(1, 4))] * 4)
        with profile(activities=[ProfilerActivity.CPU]) as record:
            engine.train_batch(data)
        marks = sorted((e for e in record.events() if e.name.startswith("PP:")), key=lambda e: e.time_range.start)
        done = [match.groups() for mark in marks if (match := re.fullmatch(r"PP:(\d+)(F|B|I|W)(\d+)", mark.name))]
        letters = {Work.FORWARD: "F", Work.BACKWARD: "B", Work.INPUTS: "I", Work.WEIGHTS: "W"}
        planned = order_of(name, Shape(world, chunks, placement, 4))[rank]
        assert done == [(str(one.part), letters[one.work], str(one.micro)) for one in planned], name
        engine.destroy()


def test_what_runs_is_the_order_that_was_planned() -> None:
    run_ranks(2, _executed, [("interleaved_zero_bubble", 3, "loop"), ("zbv_zero_bubble", 2, "v")])
