"""GraphedStep where there is no GPU. What it captures and replays is tested in tests/gpu; here is what goes with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.comm.oplog import OperationLog
from zeroshard.engine.core.handle import handle_of
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
    with pytest.raises(UsageError, match=r"amid a step.*optimizer\.step"):
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
