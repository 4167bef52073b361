"""`zero_optimization.ignore_unused_parameters: false` ends a step in which parameters got no gradient, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.errors import UsageError


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.often = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor, often: bool = True) -> torch.Tensor:
        x = self.always(x)
        return self.often(x) if often else x


def _start(stage: int, **keys: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0, **keys},
    }
    return zeroshard.initialize(model=Branches(), config=config)[0]


def _train(engine: Any, uses: list[bool]) -> None:
    for often in uses:
        engine.backward(engine(torch.ones(2, 4), often).square().mean())
        engine.step()


def _unused(rank: int, world_size: int, stage: int) -> None:
    engine = _start(stage, ignore_unused_parameters=False)
    _train(engine, [True, True])
    _train(engine, [False, True])  # a gradient in one of the micro-batches is one
    wrong = r"no gradient .*'often\.weight' \(rank 1\), 'often\.bias' \(rank 1\), and .*ignore_unused_parameters"
    with pytest.raises(UsageError, match=wrong) as raised:
        _train(engine, [rank == 0, False])
    assert isinstance(raised.value, AssertionError)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_parameter_without_a_gradient_is_named_with_its_rank_on_all_ranks(stage: int) -> None:
    run_ranks(2, _unused, stage)


@pytest.mark.parametrize("keys", [{}, {"ignore_unused_parameters": True}])
def test_unused_parameters_are_left_as_they_are_by_default(keys: dict[str, Any]) -> None:
    engine = _start(2, **keys)
    before = engine.module.often.weight.clone()
    _train(engine, [False, False])
    assert torch.equal(engine.module.often.weight, before)
    engine.destroy()
