"""Layers that read or replace weights in ways of their own: attention of torch, data that is given in a forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Task
from tests.support.training import Setting, assert_same, sgd, train_reference, train_sharded
from zeroshard.errors import UsageError

STAGES = (0, 1, 2, 3)


class _Renormalized(nn.Linear):
    """Gives its weight other data in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return torch.tanh(super().forward(x))


def _replaces(rank: int, world: int) -> None:
    model, _ = zeroshard.shard(nn.Sequential(*(_Renormalized(8, 8) for _ in range(3))), plan=3)
    with pytest.raises(UsageError, match=r"'0\.weight' was given other data"):
        model(torch.ones(2, 8)).sum().backward()


def test_data_replaced_in_a_forward_is_refused() -> None:
    run_ranks(2, _replaces)


class _Transposed(nn.Linear):
    """Gives its weight a view of the same memory in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data.t()
        return super().forward(x)


def _replaces_by_a_view(rank: int, world: int) -> None:
    for stage in STAGES:
        mine = nn.Sequential(*(_Transposed(8, 8) for _ in range(2)))
        model, optimizer = zeroshard.shard(mine, torch.optim.SGD(mine.parameters(), lr=0.1), plan=stage)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()

        with pytest.raises(UsageError, match=r"'0\.weight' was given other data"):
            step()


def test_data_replaced_by_a_view_of_the_same_memory_is_refused() -> None:
    run_ranks(2, _replaces_by_a_view)


class _Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.attention, self.out = nn.Linear(16, 128), nn.MultiheadAttention(128, 4), nn.Linear(128, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.into(x)
        return self.out(self.attention(hidden, hidden, hidden)[0])


def _attends(rank: int, world: int) -> None:
    task = Task(_Pool, lambda model, batch: model(batch.normal(3, 16)[:, None]).square().mean())
    setting = Setting(steps=2, optimizer=sgd)
    reference = train_reference(task, setting, world, rank)
    for stage in STAGES:
        assert_same(train_sharded(task, setting.at(stage), rank).parameters, reference.parameters, f"stage {stage}")


def test_an_attention_that_reads_its_projection_trains() -> None:
    run_ranks(2, _attends)
