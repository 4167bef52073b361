"""A model that ranks build under an Init that shards: its values are rank 0's, and its shapes must agree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.errors import UsageError
from zeroshard.sharding.early import ShardedInit


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
