"""On GPUs gradients are collected during a backward, though another model recomputes on autograd's thread."""

from __future__ import annotations

import pytest
import torch

import zeroshard
from tests.engine.test_backwards_of_others import DEPTH, WIDTH, Model
from tests.gpu.test_training import BACKEND, GPUS
from tests.support.distributed import run_ranks
from tests.support.measure import handle_of

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


def _trained(rank: int, world: int) -> list[int]:
    """How many units were collected before the backward reached the first block, in each of four steps."""
    device = torch.device("cuda", torch.cuda.current_device())
    other, model = Model().to(device), Model().to(device)
    reached = model
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=3, device=device)
    gradients = handle_of(model).runtime.gradients
    counts: list[int] = []
    reached.reached = lambda: counts.append(gradients.collected - before)
    x = torch.ones(2, WIDTH, device=device, requires_grad=True)
    for _ in range(4):
        other(x).backward()
        before = gradients.collected
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    zeroshard.close(model)
    return counts


def test_units_are_collected_during_a_backward_though_other_models_recompute() -> None:
    for counts in run_ranks(GPUS, _trained, backend=BACKEND):
        assert counts == [DEPTH - 1, 0, DEPTH - 1, DEPTH - 1]
