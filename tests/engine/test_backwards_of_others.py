"""Gradients are collected during a backward, though other models have trained with recomputation in the same process.

On a GPU all backwards run on one thread of autograd's, which numbers the nodes of all recomputations. Here a thread of
the test takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import handle_of
from zeroshard.engine.core.autograd import NodeOrder, made_by_backwards

WIDTH, DEPTH = 8, 5


class Model(nn.Module):
    """Blocks that are computed again; what was collected when the backward reaches the first of them is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))
        self.reached: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False)
            if number == 0:
                x.register_hook(lambda _: self.reached())
        return x.square().mean()


def _trained(rank: int, world: int, asks: bool) -> list[int]:
    """How many units were collected before the backward reached the first block, in each of four steps."""
    thread = ThreadPoolExecutor(1)

    def backward(loss: torch.Tensor) -> None:
        thread.submit(loss.backward).result()

    other, model = Model(), Model()
    reached = model
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=3)
    runtime = handle_of(model).runtime
    cpu = torch.device("cpu")
    ask = (lambda: thread.submit(partial(made_by_backwards, cpu)).result()) if asks else None
    runtime.backward.order = NodeOrder(ask)
    counts: list[int] = []

    def note() -> None:
        counts.append(runtime.gradients.collected - before)

    reached.reached = note
    x = torch.ones(2, WIDTH, requires_grad=True)
    for _ in range(4):
        backward(other(x))
        before = runtime.gradients.collected
        backward(model(x))
        optimizer.step()
        optimizer.zero_grad()
    zeroshard.close(model)
    thread.shutdown()
    return counts


@pytest.mark.parametrize("asks", [True, False])
def test_units_are_collected_during_a_backward_though_other_models_recompute_on_its_thread(asks: bool) -> None:
    (counts,) = run_ranks(1, _trained, asks)
    known = [DEPTH - 1, 0, DEPTH - 1, DEPTH - 1]  # the second step finds that others run between, and asks from then on
    assert counts == (known if asks else [0] * 4)


def test_nodes_that_a_forward_has_made_on_the_thread_of_backwards_have_no_known_order() -> None:
    made = [7]
    with ThreadPoolExecutor(1) as thread:
        order = thread.submit(NodeOrder, lambda: (0, made[0])).result()
        order.forward_begins(first=True)
        assert order.holds(), "the forward's own thread"
        thread.submit(order.forward_begins, first=True).result()
        assert not order.holds(), "another thread, which has made other nodes than it was said to"
