"""Clipping by value: as torch's clip_grad_value_ in one process, at every stage and wherever gradients rest."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Batch, square_loss
from tests.support.training import full_parameters
from tests.support.zoo import Stack
from zeroshard.errors import ConfigError, UsageError

LIMIT = 0.01


def _reference(world: int, micro: int, clip_norm: float) -> dict[str, torch.Tensor]:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        for part in range(micro):
            for rank in range(world):
                (square_loss(model, Batch(step, part, rank)) / (world * micro)).backward()
        nn.utils.clip_grad_value_(model.parameters(), LIMIT)
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def _native(rank: int, world: int) -> None:
    for stage in range(4):
        for micro, clip_norm in ((1, 0.0), (1, 0.005), (2, 0.0)):
            torch.manual_seed(0)
            expected = _reference(world, micro, clip_norm)
            torch.manual_seed(0)
            model = Stack()
            model, optimizer = zeroshard.shard(
                model,
                torch.optim.SGD(model.parameters(), lr=0.5),
                plan=stage,
                accumulate=micro > 1,
                clip_norm=clip_norm or None,
            )
            for step in range(2):
                for part in range(micro):
                    (square_loss(model, Batch(step, part, rank)) / micro).backward()
                zeroshard.clip_grad_value_(model, LIMIT)
                optimizer.step()
                optimizer.zero_grad()
            for name, value in full_parameters(model).items():
                assert torch.allclose(value, expected[name], atol=1e-7), (stage, micro, clip_norm, name)
            zeroshard.close(model)


def test_it_is_that_of_one_process_at_every_stage() -> None:
    run_ranks(2, _native)


def _by_config(rank: int, world: int, zero: dict[str, Any], more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Stack()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clip_value": LIMIT,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD" if "offload_optimizer" not in zero else "AdamW", "params": {"lr": 0.5}},
        "zero_optimization": zero,
        **more,
    }
    engine, *_ = zeroshard.initialize(model=model, config=config)
    loss = square_loss(engine, Batch(0, 0, rank))
    engine.backward(loss * 100)
    engine.step()
    moved = max(float((value - before[name]).abs().max()) for name, value in full_parameters(engine.module).items())
    norm = engine.get_global_grad_norm()
    count = sum(value.numel() for value in before.values())
    assert norm is not None
    assert 0 < norm <= LIMIT * count**0.5 * 1.01
    if "offload_optimizer" not in zero:
        assert moved == pytest.approx(0.5 * LIMIT, rel=0.01)
    engine.destroy()


@pytest.mark.parametrize(
    ("zero", "more"),
    [
        ({"stage": 2}, {}),
        ({"stage": 3}, {}),
        ({"stage": 3}, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"bf16": {"enabled": True}}),
    ],
)
def test_the_config_clips_each_step_whatever_the_scale_and_wherever_gradients_rest(
    zero: dict[str, Any], more: dict[str, Any]
) -> None:
    run_ranks(2, _by_config, zero, more)


def _refuses(rank: int, world: int) -> None:
    model, _ = zeroshard.shard(Stack(), torch.optim.AdamW, plan=3)
    with pytest.raises(UsageError, match="no gradient"):
        zeroshard.clip_grad_value_(model, 1.0)
    square_loss(model, Batch(0, 0, rank)).backward()
    with pytest.raises(UsageError, match="must be above 0"):
        zeroshard.clip_grad_value_(model, 0.0)
    with pytest.raises(UsageError, match=r"zeroshard\.clip_grad_value_"):
        nn.utils.clip_grad_value_(model.parameters(), 1.0)


def test_what_can_not_be_clipped_is_refused_and_torchs_own_call_names_ours() -> None:
    run_ranks(2, _refuses)
    with pytest.raises(ConfigError, match="gradient_clip_value"):
        zeroshard.initialize(model=Stack(), config={"train_micro_batch_size_per_gpu": 1, "gradient_clip_value": -1.0})


def test_an_infinite_norm_measures_and_leaves_the_clipping_of_the_plan() -> None:
    found: list[dict[str, torch.Tensor]] = []
    for measures in (False, True):
        torch.manual_seed(0)
        model = Stack()
        model, optimizer = zeroshard.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.5), plan=2, accumulate=True, clip_norm=1e-3
        )
        for micro in range(2):
            square_loss(model, Batch(0, micro, 0)).backward()
        if measures:
            assert zeroshard.clip_grad_norm_(model, math.inf) > 1e-3
        optimizer.step()
        found.append(full_parameters(model))
        zeroshard.close(model)
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_a_backward_after_whole_gradients_were_summed_is_refused_with_what_to_do() -> None:
    model = Stack()
    model, _ = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), plan=1, accumulate=True)
    square_loss(model, Batch(0, 0, 0)).backward()
    zeroshard.clip_grad_norm_(model, math.inf)
    with pytest.raises(UsageError, match=r"was summed over the ranks, .*safe_get_full_grad\), after the last"):
        square_loss(model, Batch(0, 1, 0)).backward()
    zeroshard.close(model)
