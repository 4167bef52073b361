"""A step consumes its gradients, and sharding drops earlier ones: where torch would go on with them, that is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.cases import sample
from tests.support.distributed import run_ranks
from zeroshard.errors import UsageError, ZeroShardWarning
from zeroshard.optim.optimizer import ShardedOptimizer

X = torch.ones(2, 4)


def _sharded(stage: int) -> tuple[nn.Module, ShardedOptimizer]:
    mine = nn.Linear(4, 4)
    return zeroshard.shard(mine, torch.optim.SGD(mine.parameters(), lr=0.1), plan=stage)


def _warnings_of(train: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ZeroShardWarning)
        train()
    return [str(one.message) for one in found if one.category is ZeroShardWarning]


def _steps(rank: int, world: int) -> None:
    for stage in range(4):
        model, optimizer = _sharded(stage)

        def backward_and_step(model: nn.Module = model, optimizer: ShardedOptimizer = optimizer) -> None:
            model(X).sum().backward()
            optimizer.step()

        assert _warnings_of(backward_and_step) == []
        (again,) = _warnings_of(optimizer.step)
        assert "be applied once more; here nothing is updated. Call optimizer.zero_grad()" in again
        assert _warnings_of(optimizer.step) == [], "said once"

        model, optimizer = _sharded(stage)
        backward_and_step(model, optimizer)
        (added,) = _warnings_of(lambda model=model, optimizer=optimizer: backward_and_step(model, optimizer))
        assert "the new ones be added to them; here the new ones are applied alone" in added

        model, optimizer = _sharded(stage)
        for _ in range(2):
            optimizer.zero_grad()
            assert _warnings_of(lambda model=model, optimizer=optimizer: backward_and_step(model, optimizer)) == []


def _set_to_none(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _zero_those_there(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


_DROPS: dict[str, Callable[[nn.Module], None]] = {
    "model.zero_grad()": nn.Module.zero_grad,
    "model.zero_grad(set_to_none=False)": partial(nn.Module.zero_grad, set_to_none=False),
    "grad = None": _set_to_none,
    "grad.zero_()": _zero_those_there,
    "zero_grad() of another optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "zero_grad() in place": lambda model: torch.optim.SGD(model.parameters(), foreach=True).zero_grad(False),
}


def _other_ways(rank: int, world: int) -> None:
    for stage in sample([1, 0, 3, 2]):
        for way, drop in _DROPS.items():
            for before in (False, True):
                model, optimizer = _sharded(stage)

                def train(
                    model: nn.Module = model,
                    optimizer: ShardedOptimizer = optimizer,
                    drop: Callable[[nn.Module], None] = drop,
                    before: bool = before,
                ) -> None:
                    optimizer.step()  # some scripts do so for the scheduler; there are no gradients to consume
                    optimizer.step()
                    for _ in range(3):
                        if before:
                            drop(model)
                        model(X).sum().backward()
                        optimizer.step()
                        if not before:
                            drop(model)

                assert _warnings_of(train) == [], f"{way}, stage {stage}, {before}"


def test_gradients_that_are_dropped_in_another_way_are_not_told() -> None:
    run_ranks(2, _other_ways)


def _zeros(rank: int, world: int) -> None:
    for stage in range(4):
        model, optimizer = _sharded(stage)

        def train(*, backward: bool, model: nn.Module = model, optimizer: ShardedOptimizer = optimizer) -> None:
            if backward:
                model(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        assert _warnings_of(partial(train, backward=True)) == []
        assert _warnings_of(partial(train, backward=True)) == [], "all parameters got a gradient"
        (told,) = _warnings_of(partial(train, backward=False))
        assert "would update those that had one before by gradients of zero" in told
        assert _warnings_of(partial(train, backward=False)) == [], "said once"


def test_gradients_that_torch_would_take_for_zeros_are_told_of_once() -> None:
    run_ranks(2, _zeros)


def _read_after_the_step(rank: int, world: int) -> None:
    for stage in range(4):
        model, optimizer = _sharded(stage)
        model(X).sum().backward()
        optimizer.step()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        with pytest.raises(UsageError, match=r"zeroshard\.get_global_grad_norm"):
            torch.stack([gradient.norm() for gradient in gradients]).norm()


def test_norms_of_gradients_that_are_taken_after_the_step_are_not_zero_in_silence() -> None:
    run_ranks(2, _read_after_the_step)


def test_a_step_without_zero_grad_since_the_last_one_is_told_once() -> None:
    run_ranks(2, _steps)


def _earlier_gradients(rank: int, world: int) -> None:
    for stage in range(4):
        mine = nn.Linear(4, 4)
        mine(X).sum().backward()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        with pytest.warns(ZeroShardWarning, match="'weight' has a gradient of a backward before the model was sharded"):
            zeroshard.shard(mine, optimizer, plan=stage)
        zeroshard.close(mine)
        other = nn.Linear(4, 4)
        other(X).sum().backward()
        other.zero_grad(set_to_none=False)
        zeroshard.shard(other, torch.optim.SGD(other.parameters(), lr=0.1), plan=stage)


def test_gradients_from_before_the_sharding_are_told_of_unless_they_are_zero() -> None:
    run_ranks(2, _earlier_gradients)


def _engine(rank: int, world: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zeroshard.initialize(model=nn.Linear(4, 4), config=config)
    for _ in range(3):
        engine.backward(engine(X).sum())
        engine.step()


def test_the_engine_of_initialize_drops_them_itself() -> None:
    run_ranks(2, _engine)
