"""Ranks whose forwards differ train right or end, within seconds, in an error that names unit and rank."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.cases import only_with_all_cases
from tests.support.distributed import run_ranks
from tests.support.models import WIDTH, Batch, Task, square_loss
from tests.support.training import Setting, assert_same, shard_task, train_reference, train_sharded
from tests.support.zoo import Stack
from zeroshard.engine.core.handle import handle_of
from zeroshard.errors import DivergenceError, ZeroShardError
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.offload import Offload
from zeroshard.plan.policy import ExecutionPolicy, HostUpdate

STAGES = (0, 1, 2, 3)
LIMIT_S = 10.0
EVERY = (0, 1, 2, 3)


def _branches(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Which blocks run depends on the data of each rank, as with experts."""
    x = batch.normal(3, WIDTH)
    chosen = tuple(index for index in range(4) if x[0, index] > 0)
    return model(x, chosen).square().mean()


def _single_skip(model: nn.Module, batch: Batch) -> torch.Tensor:
    """In each step one rank leaves one block out."""
    skipped = batch.step % 4 if batch.rank == batch.step % 2 else -1
    return model(batch.normal(3, WIDTH), tuple(i for i in EVERY if i != skipped)).square().mean()


def _compare(rank: int, world: int) -> None:
    for loss in (_branches, _single_skip):
        setting = Setting(steps=6)
        reference = train_reference(Task(Stack, loss), setting, world, rank)
        for stage in STAGES:
            outcome = train_sharded(Task(Stack, loss), setting.at(stage), rank)
            assert_same(outcome.parameters, reference.parameters, f"{loss.__name__}, stage {stage}")

    _first_step_that_drops_blocks(rank)


def _first_step_that_drops_blocks(rank: int) -> None:
    """All ranks drop the same blocks in the first step (LayerDrop): later steps gather as if it had been whole."""
    counts = []
    for first in (EVERY, (0, 3), (2,)):
        model, optimizer = shard_task(Task(Stack, square_loss), Setting())
        for step in range(3):
            handle_of(model).comm.log.reset_totals()
            loss = model(Batch(step, 0, rank).normal(3, WIDTH), EVERY if step else first).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(handle_of(model).comm.log.totals()["all-gather"][0])
        zeroshard.close(model)
    assert len(set(counts)) == 1, counts


def test_blocks_skipped_on_some_ranks_train_right_at_every_stage() -> None:
    run_ranks(2, _compare)


@dataclass(frozen=True)
class _Ending:
    """How a rank ended: the error's kind and text, or 'right', and after how long."""

    kind: str
    text: str
    seconds: float


def _another_order(rank: int, world: int, stage: int, order: tuple[int, ...]) -> _Ending:
    model, optimizer = shard_task(Task(Stack, square_loss), Setting(plan=stage))
    start = time.monotonic()
    try:
        for step in range(3):
            mine = order if rank == 1 and step else EVERY
            model(Batch(step, 0, rank).normal(3, WIDTH), mine).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except ZeroShardError as error:
        return _Ending(type(error).__name__, str(error), time.monotonic() - start)
    return _Ending("right", "", time.monotonic() - start)


@pytest.mark.parametrize(
    ("stage", "order"),
    [
        (2, (3, 2, 1, 0)),
        (3, (1, 0, 2, 3)),
        pytest.param(3, (3, 2, 1, 0), marks=only_with_all_cases),
        (3, (0, 1, 0, 1, 2, 3)),
    ],
)
def test_another_order_on_one_rank_is_right_or_a_divergence(stage: int, order: tuple[int, ...]) -> None:
    endings = run_ranks(2, _another_order, stage, order, timeout=60)
    assert len({ending.kind for ending in endings}) == 1, endings
    for ending in endings:
        assert ending.seconds < LIMIT_S, ending
        if ending.kind != "right":
            assert ending.kind == DivergenceError.__name__
            assert "blocks." in ending.text
            assert "rank 0" in ending.text
            assert "rank 1" in ending.text


def _leaves(rank: int, world: int, how: str) -> _Ending:
    model, optimizer = shard_task(Task(Stack, square_loss), Setting())
    start = time.monotonic()
    try:
        for step in range(3):
            if rank == 1 and step == 1:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                zeroshard.close(model)  # as at the end of a process
                return _Ending("left", "", 0.0)
            square_loss(model, Batch(step, 0, rank)).backward()
            optimizer.step()
    except ZeroShardError as error:
        return _Ending(type(error).__name__, str(error), time.monotonic() - start)
    return _Ending("right", "", time.monotonic() - start)


def test_a_rank_that_stops_early_is_an_error_on_the_other() -> None:
    waiting, left = run_ranks(2, _leaves, "closes", timeout=60)
    assert left.kind == "left"
    assert waiting.kind == ZeroShardError.__name__
    assert "rank 1 left" in waiting.text
    assert waiting.seconds < LIMIT_S


def test_a_killed_rank_is_an_error_on_the_other() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, _killed, timeout=60)
    text = str(caught.value)
    assert "rank 1 failed first" in text
    assert "killed by SIGKILL" in text
    assert "then rank 0: zeroshard.errors.ZeroShardError: rank 1 died" in text, text


def _killed(rank: int, world: int) -> None:
    ending = _leaves(rank, world, "killed")
    assert ending.seconds < LIMIT_S
    raise ZeroShardError(ending.text)


def _error_on_one_rank(rank: int, world: int) -> _Ending:
    model, optimizer = shard_task(Task(Stack, square_loss), Setting())
    start = time.monotonic()
    try:
        for step in range(3):
            if rank == 1 and step == 1:
                with pytest.raises(IndexError):
                    model(Batch(step, 0, rank).normal(3, WIDTH), (0, 99))
                continue  # the rank swallows its error and goes on with the next step
            square_loss(model, Batch(step, 0, rank)).backward()
            optimizer.step()
    except ZeroShardError as error:
        return _Ending(type(error).__name__, str(error), time.monotonic() - start)
    zeroshard.close(model)
    return _Ending("right", "", time.monotonic() - start)


def test_a_step_swallowed_on_one_rank_is_never_silent() -> None:
    endings = run_ranks(2, _error_on_one_rank, timeout=60)
    assert endings[0].kind != "right", endings
    assert all(ending.seconds < 2 * LIMIT_S for ending in endings), endings


def _logs(rank: int, world: int) -> None:
    for stage in STAGES:
        for subgroup in (world, 2):
            model = Stack()
            model, optimizer = zeroshard.shard(
                model, torch.optim.AdamW(model.parameters()), plan=stage, shard_size=subgroup, accumulate=True
            )
            comm = handle_of(model).comm
            comm.log.reset_totals()
            comm.sent.reset_totals()
            for micro in range(2):
                square_loss(model, Batch(0, micro, rank)).backward()
            optimizer.step()
            calls = {kind: calls for kind, (calls, _) in comm.log.totals().items()}
            assert calls == {kind: calls for kind, (calls, _) in comm.sent.totals().items()}, (stage, subgroup)
            zeroshard.close(model)


def test_the_log_has_every_collective_of_a_step() -> None:
    """Without those that follow a reduce-scatter, ranks at stages 0 and 1 waited for each other without a word."""
    run_ranks(4, _logs)


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "stage": (
        {"plan": 0},
        {"plan": 1},
        r"rank 0 with unit \(root\): .* updated whole.*; 3 more, rank 1 with .* in parts",
    ),
    "clipping": ({}, {"clip_norm": 1.0}, r"rank 0 with clip_norm: 0\.0, rank 1 with clip_norm: 1\.0"),
    "mean": (
        {},
        {"plan": Recipe(policy=ExecutionPolicy(mean=False))},
        r"rank 0 with mean: True, rank 1 with mean: False",
    ),
    "accumulation": ({}, {"accumulate": True}, r"rank 0 with accumulate: False"),
    "wire": ({}, {"plan": Recipe(precision=Precision(wire="bf16"))}, r"sent in float32.* sent in bfloat16"),
}


def _different_plans(rank: int, world: int, name: str) -> None:
    *options, said = DIFFERENT[name]
    model = Stack()
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **options[rank])

    def step() -> None:
        square_loss(model, Batch(0, 0, rank)).backward()
        optimizer.step()

    with pytest.raises(DivergenceError, match=rf"ranks sharded by different plans: .*{said}"):
        step()


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_different_plans_are_told_in_what_they_differ(name: str) -> None:
    run_ranks(2, _different_plans, name, timeout=60)


def _hosts_differ(rank: int, world: int) -> None:
    model = Stack()
    offload = Offload(param=rank == 1, update=HostUpdate.PROCESSOR) if rank else None
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=Recipe(offload=offload))
    for step in range(2):
        square_loss(model, Batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[model.get_parameter("outer.weight")]["step"] == 2


def test_where_state_rests_may_differ() -> None:
    run_ranks(2, _hosts_differ)
