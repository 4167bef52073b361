"""A model whose parameters are sharded and which no engine has: what is asked of it is refused by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Batch, square_loss
from tests.support.zoo import Stack
from zeroshard.errors import UsageError
from zeroshard.sharding.sharded_init import ShardedInit

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def _hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._state_dict_hooks) for module in model.modules())


def _refused(model: nn.Module, rank: int) -> None:
    first = next(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    needs = r"is sharded.*zeroshard\.initialize\(\).*GatheredParameters"
    with pytest.raises(UsageError, match=rf"forward of '{first}' \(Linear\): its parameter 'weight' {needs}"):
        square_loss(model, Batch(0, 0, rank))
    with zeroshard.GatheredParameters(model):
        assert square_loss(model, Batch(0, 0, rank)).isfinite()


def _trains_unhindered(model: nn.Module, rank: int) -> zeroshard.Engine:
    """Hooks on the parts of the model are those of a model that never was unowned."""
    engine = zeroshard.initialize(model=model, config=CONFIG)[0]
    never = zeroshard.initialize(model=Stack(), config=CONFIG)[0]
    assert _hooks(model) == _hooks(never.module)
    never.destroy()
    engine.backward(square_loss(engine, Batch(0, 0, rank)))
    engine.step()
    return engine


def _forwards(rank: int, world: int) -> None:
    with ShardedInit():
        model = Stack()
    _refused(model, rank)
    _refused(copy.deepcopy(model), rank)
    engine = _trains_unhindered(model, rank)
    engine.destroy()
    _refused(model, rank)
    with pytest.raises(UsageError, match="its parameter 'weight' is sharded"):
        engine(torch.zeros(2, 8))
    _trains_unhindered(model, rank).destroy()


def test_a_forward_before_initialize_and_after_destroy_names_the_module_and_the_cure() -> None:
    run_ranks(2, _forwards)


def _states(rank: int, world: int) -> None:
    engine = zeroshard.initialize(model=Stack(), config=CONFIG)[0]
    model = engine.module
    engine.destroy()
    reads: tuple[Callable[[], object], ...] = (model.state_dict, lambda: torch.save(model.state_dict(), io.BytesIO()))
    for read in reads:
        with pytest.raises(UsageError, match=r"state_dict\(\): parameter '.*' is sharded and empty.*Gathered"):
            read()
    with zeroshard.GatheredParameters(model):
        assert {name: value.shape for name, value in model.state_dict().items()} == {
            name: value.shape for name, value in Stack().state_dict().items()
        }


def test_the_state_dict_of_a_closed_model_is_not_saved_empty() -> None:
    run_ranks(2, _states)
