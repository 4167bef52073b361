"""GraphedStep where there is no GPU. What it captures and replays is tested in tests/gpu; here is what goes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.comm.oplog import OperationLog
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.graphed_engine import Counts, EngineBesideGraph
from zeroshard.errors import UsageError
from zeroshard.optim.optimizer import ShardedOptimizer


def _sharded() -> tuple[nn.Module, ShardedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), plan=3)


def _called(rank: int, world: int) -> None:
    model, optimizer = _sharded()

    def train(x: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
        loss = model(x).square().mean() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach()}

    step, x = zeroshard.GraphedStep(model, train), torch.ones(2, 8)
    losses = [float(step(x, scale=2.0)["loss"]) for _ in range(5)]
    assert losses[-1] < losses[0], losses
    assert step.graphs == 0
    with pytest.raises(UsageError, match="an argument requires a gradient"):
        step(x.clone().requires_grad_(), scale=2.0)  # a GPU would capture it once and never see its gradient again
    with pytest.raises(UsageError, match=r"GraphedStep: a function .* is needed, got None"):
        zeroshard.GraphedStep(model, None)  # pyright: ignore[reportArgumentType]
    zeroshard.close(model)
    with pytest.raises(UsageError, match="closed"):
        step(x, scale=2.0)


def _rests(rank: int, world: int) -> None:
    """Equal states between steps are told from others: a graph is only good for the state in which it was captured."""
    model, optimizer = _sharded()
    runtime = handle_of(model).runtime

    def train() -> None:
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        train()
    rested = runtime.resting()
    train()
    assert runtime.resting() == rested
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert runtime.resting() != rested, "an evaluation leaves the slots otherwise"
    train()
    assert runtime.resting() == rested
    zeroshard.offload_states(model)
    zeroshard.reload_states(model)
    assert runtime.resting().memory != rested.memory, "state lies elsewhere"
    model(torch.ones(2, 8)).square().mean().backward()
    with pytest.raises(UsageError, match=r"within a step.*optimizer\.step"):
        runtime.resting()
    optimizer.zero_grad()
    runtime.abandon()
    train()
    zeroshard.close(model)


def test_without_a_gpu_the_function_is_called_and_a_state_is_known_again() -> None:
    run_ranks(2, _called)
    run_ranks(2, _rests)


def test_a_repeated_recording_is_what_issuing_the_same_again_would_be() -> None:
    issued, repeated = OperationLog(), OperationLog()

    def step(log: OperationLog, table: str) -> None:
        log.record("all-gather", "a", 8)
        log.record_step(table)
        digests.append(log.digest())
        log.record("all-reduce", "(step)", 16)

    digests: list[int] = []
    step(issued, "lr 1")
    step(issued, "lr 2")
    with repeated.recording() as recording:
        step(repeated, "lr 1")
    at_step = repeated.repeat(recording, "lr 2")
    assert (issued.digest(), issued.count, issued.totals()) == (repeated.digest(), repeated.count, repeated.totals())
    assert at_step == digests[1]
    assert repeated.repeat(recording, "lr 3") != at_step


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear"}},
    "zero_optimization": {"stage": 3},
}


def _engine() -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    engine, *_ = zeroshard.initialize(model=model, config=CONFIG)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(())
        for _ in range(2):
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return engine, train


def _counters(engine: Any) -> tuple[Any, ...]:
    return engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps, engine.get_lr()


def _as_it_is(rank: int, world: int) -> None:
    (plain, train), x = _engine(), torch.ones(2, 8)
    expected = [float(train(x)) for _ in range(6)]
    engine, other = _engine()
    step = zeroshard.GraphedStep(engine, other)
    assert [float(step(x)) for _ in range(6)] == expected
    assert _counters(engine) == _counters(plain)


def test_an_engine_makes_its_steps_in_a_graphed_step() -> None:
    run_ranks(2, _as_it_is)


def _beside_a_graph(rank: int, world: int) -> None:
    (plain, train), x = _engine(), torch.ones(2, 8)
    engine, other = _engine()
    for _ in range(2):
        train(x)
    beside = EngineBesideGraph(engine)
    beside.before()
    with beside.captured() as found:
        other(x)
    beside.after()
    assert found == [Counts(micro_batches=2, samples=4 * world)]
    beside.before()
    beside.replayed(found[0])
    assert _counters(engine) == _counters(plain)

    def capture(*functions: Callable[[], object]) -> None:
        with beside.captured():
            for function in functions:
                function()

    with pytest.raises(UsageError, match=r"made 2 steps .* it makes one"):
        capture(lambda: other(x), lambda: other(x))
    with pytest.raises(UsageError, match="made 0 steps"):
        capture(lambda: engine.backward(engine(x).square().mean()), engine.step)
    assert _counters(engine) == _counters(plain)


def test_what_an_engine_counted_at_the_capture_it_counts_at_each_replay() -> None:
    run_ranks(2, _beside_a_graph)


def test_an_engine_that_reports_its_passes_is_refused_by_name() -> None:
    model = nn.Linear(8, 4)
    engine, *_ = zeroshard.initialize(model=model, config={**CONFIG, "wall_clock_breakdown": True})
    with pytest.raises(UsageError, match=r"GraphedStep: the engine times .* wall_clock_breakdown"):
        zeroshard.GraphedStep(engine, lambda: None)
