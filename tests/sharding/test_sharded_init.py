"""A model that ranks build under an Init that shards: its values are rank 0's, and its shapes must agree."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.errors import UsageError
from zeroshard.sharding.sharded_init import ShardedInit


class _Net(nn.Module):
    """Sets a weight by the rank, another on rank 0 alone, and draws the rest from random numbers of the rank."""

    def __init__(self, rank: int, width: int = 5) -> None:
        super().__init__()
        self.drawn = nn.Linear(width, 7)
        self.own = nn.Linear(width, 3)
        self.first = nn.Parameter(torch.zeros(5))
        self.register_buffer("table", torch.arange(3.0))
        with torch.no_grad():
            self.own.weight.fill_(1 + rank)
            if rank == 0:
                self.first[1:4].fill_(4)
                self.own.bias.fill_(2)


def _builds(rank: int, world: int, dtype: torch.dtype | None) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    with ShardedInit(param_dtype=dtype):
        model = _Net(rank)
    assert [p.numel() for p in model.parameters()] == [0] * 5
    assert isinstance(model.table, torch.Tensor)
    assert torch.equal(model.table, torch.arange(3.0))
    with zeroshard.GatheredParameters(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_values_are_those_of_rank_0(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    expected = [parameter.detach().to(dtype or torch.float32) for parameter in _Net(0).parameters()]
    for values in run_ranks(3, _builds, dtype):
        assert all(torch.equal(value, of_rank_0) for value, of_rank_0 in zip(values, expected, strict=True))


def _differs(rank: int, world: int) -> None:
    with pytest.raises(UsageError, match=r"ranks \[1\] have built other parameters under Init than rank 0"):
        with ShardedInit():
            _Net(0, width=5 + rank)
    dist.barrier()


def test_other_shapes_are_refused_on_all_ranks() -> None:
    run_ranks(2, _differs)


def _alone(rank: int, world: int, folder: str) -> str:
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=4))
    if rank == 1:
        return ""
    with pytest.raises(UsageError) as caught, ShardedInit():
        _Net(0)
    return str(caught.value)


def test_a_model_that_one_rank_builds_alone_is_refused_there_before_the_group_gives_up(tmp_path: Path) -> None:
    said = run_ranks(2, _alone, str(tmp_path))[0]
    assert "ranks [1] have not come in 4 seconds" in said
    assert "Init(enabled=False)" in said


def _inside_of_another(rank: int, world: int) -> None:
    """A model of an inner context is sharded, gathered and trained while the outer one is open."""
    torch.manual_seed(0)
    plain, later = nn.Linear(5, 5), nn.Linear(5, 3)
    for outer in (zeroshard.Init, ShardedInit):
        torch.manual_seed(0)
        with outer():
            with ShardedInit():
                one = nn.Linear(5, 5)
            model, optimizer = zeroshard.shard(one, torch.optim.SGD(one.parameters(), lr=0.1), plan=3)
            with zeroshard.GatheredParameters(model):
                assert torch.equal(one.weight, plain.weight)
            two = nn.Linear(5, 3)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        sharded, _ = zeroshard.shard(two, plan=3)
        with zeroshard.GatheredParameters(sharded):
            assert torch.equal(two.weight, later.weight)
            assert torch.equal(two.bias, later.bias)


def test_a_model_of_an_inner_context_can_be_sharded_while_the_outer_one_is_open() -> None:
    run_ranks(2, _inside_of_another)
