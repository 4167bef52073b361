"""On a GPU: a whole model in one compiled graph trains as the eager one, by the default backend."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Batch, Transformer
from zeroshard.plan.placement import STAGES

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
BACKEND = "cpu:gloo,cuda:nccl"
STEPS = 4


def _losses(rank: int, stage: int, compiled: bool) -> list[float]:
    device = torch.device("cuda", rank % GPUS)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    model = Transformer()
    recipe = zeroshard.Recipe(sharding=STAGES[stage], policy=zeroshard.ExecutionPolicy(clip_norm=1.0))
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), 1e-3), plan=recipe, device=device)
    called = torch.compile(model) if compiled else model
    found: list[float] = []
    for step in range(STEPS):
        tokens = Batch(step, 0, rank).tokens().to(device)
        logits = called(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    assert not compiled or not counters["graph_break"], dict(counters["graph_break"])
    zeroshard.close(model)
    return found


def _as_eager(rank: int, world: int, stages: tuple[int, ...]) -> None:
    for stage in stages:
        eager, compiled = _losses(rank, stage, False), _losses(rank, stage, True)
        assert compiled == pytest.approx(eager, abs=1e-4), stage


def test_a_whole_model_compiles_to_one_graph_and_trains_as_without() -> None:
    run_ranks(1, _as_eager, (0, 2, 3), backend=BACKEND, timeout=170)


@pytest.mark.skipif(GPUS < 2, reason="needs GPUs over which the optimizer's state is divided")
def test_so_it_does_where_state_is_divided() -> None:
    run_ranks(2, _as_eager, (1, 2), backend=BACKEND, timeout=170)
