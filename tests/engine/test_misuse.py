"""Uses of a sharded model that could go wrong without a word: they work, or are refused with what to do instead."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import WIDTH, Batch, Task, square_loss
from tests.support.training import Setting, assert_same, full_parameters, shard_task, shared_reference
from tests.support.zoo import Stack
from zeroshard.errors import PlanError, UsageError
from zeroshard.sharding.units import find_units

TASK = Task(Stack, square_loss)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


class _Aside(nn.Module):
    """Its second layer puts its output aside instead of returning it."""

    def __init__(self, returned: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.aside = nn.Linear(WIDTH, WIDTH), _Keeps(returned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside(self.first(x))
        return self.aside.kept.pop().square().mean()


class _Keeps(nn.Module):
    def __init__(self, returned: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.returned = nn.Linear(WIDTH, WIDTH), returned
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.kept.append(self.linear(x))
        return self.returned()


def _no_tensor(rank: int, world: int) -> None:
    x = torch.ones(2, WIDTH)
    for returned in (lambda: None, lambda: 0.5, dict):
        model = _Aside(returned)
        model, _ = zeroshard.shard(model, torch.optim.AdamW, plan=3, units=["first", "aside"])
        with pytest.raises(UsageError, match="unit 'aside' returned no tensor"):
            model(x)
        with torch.no_grad():
            assert model(x).isfinite()
        zeroshard.close(model)


def _copies(rank: int, world: int) -> None:
    model, optimizer = shard_task(TASK, Setting())
    assert isinstance(model, Stack)
    for thing, words in ((model, "a sharded model"), (model.blocks[0], "a sharded model"), (optimizer, "optimizer")):
        for do in (copy.deepcopy, copy.copy, lambda it: torch.save(it, io.BytesIO())):
            if do is copy.copy and thing is not optimizer:
                continue  # shares its hooks and parameters with the original
            with pytest.raises(UsageError, match=f"{words}.* can't be copied or pickled.*zeroshard"):
                do(thing)
    square_loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()
    assert full_parameters(model)


def _closed(rank: int, world: int) -> None:
    model, optimizer = shard_task(TASK, Setting())
    square_loss(model, Batch(0, 0, rank)).backward()
    zeroshard.close(model)
    uses: tuple[Callable[[], object], ...] = (
        optimizer.step,
        lambda: zeroshard.full_state_dict(model),
        lambda: zeroshard.drain(model),
    )
    for use in uses:
        with pytest.raises(UsageError, match=r"Stack was closed \(zeroshard.close\(\), engine.destroy\(\)\)"):
            use()
    engine = zeroshard.initialize(model=Stack(), config=CONFIG)[0]
    loss = square_loss(engine, Batch(0, 0, rank))
    engine.destroy()
    for use in (lambda: engine.backward(loss), engine.step, engine.get_lr, lambda: engine.save_checkpoint("x")):
        with pytest.raises(UsageError, match="was closed"):
            use()
    engine.destroy()


def _input_gradients(rank: int, world: int) -> None:
    """torch.autograd.grad gives what it gives unsharded, and the training around it does not notice."""
    reference = shared_reference(TASK, Setting(steps=2), world)
    for stage in range(4):
        model, optimizer = shard_task(TASK, Setting(plan=stage))
        for step in range(2):
            _compare_gradients(model, Batch(step, 1, rank))
            loss = square_loss(model, Batch(step, 0, rank))
            loss.backward()
            _compare_gradients(model, Batch(step, 2, rank))
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_parameters(model), reference.parameters, f"stage {stage}")
        zeroshard.close(model)


def _compare_gradients(model: nn.Module, batch: Batch) -> None:
    plain = Stack()
    plain.load_state_dict({name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)})
    found = []
    for which in (model, plain):
        x = batch.normal(2, WIDTH).requires_grad_()
        y = which(x).square().sum()
        found.append(torch.autograd.grad(y, x, retain_graph=True)[0])
        found.append(torch.autograd.grad(y, x)[0])
    assert all(torch.equal(found[0], gradient) for gradient in found[1:])


def _gradients_of_parameters(rank: int, world: int) -> None:
    model, optimizer = shard_task(TASK, Setting(plan=1))
    asked = list(model.parameters())
    gradients = torch.autograd.grad(square_loss(model, Batch(0, 0, rank)), asked, allow_unused=True)
    assert [g.shape for g in gradients if g is not None] == [p.shape for p in asked]
    assert all(p.grad is None for p in asked)
    square_loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()


def _made_of_tensors(rank: int, world: int) -> None:
    """As a model is after fully_shard: its parameters are no plain tensors."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(UsageError, match=r"parameter '0\.weight' is a TwoTensor, a tensor made of others"):
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _one_of_two_names(rank: int, world: int) -> None:
    """The other module with the tied weight goes on to give it gradients."""
    for replaced in ("embedding", "head"):
        model = nn.ModuleDict({"embedding": nn.Embedding(4, 8), "head": nn.Linear(8, 4, bias=False)})
        model["head"].weight = model["embedding"].weight
        _, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=2)
        model[replaced] = nn.Embedding(4, 8) if replaced == "embedding" else nn.Linear(8, 4, bias=False)
        with pytest.raises(UsageError, match=rf"'{replaced}\.weight' was added or replaced"):
            optimizer.step()


def _checks(rank: int, world: int) -> None:
    for check in (
        _one_of_two_names,
        _no_tensor,
        _copies,
        _closed,
        _input_gradients,
        _gradients_of_parameters,
        _made_of_tensors,
    ):
        check(rank, world)


def test_what_no_hook_can_see_and_what_comes_after_the_end_is_refused_and_input_gradients_are_right() -> None:
    run_ranks(2, _checks)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plan_for_other_ranks_is_refused_by_their_number(stage: int) -> None:
    plan = zeroshard.build_plan(find_units(Stack()), zeroshard.Recipe(zeroshard.STAGES[stage]), 8)
    with pytest.raises(PlanError, match=r"the plan is for 8 ranks .*, but 1 is running; make it .*, 1\)"):
        zeroshard.shard(Stack(), torch.optim.AdamW, plan=plan)


def test_an_engine_in_place_of_its_model_is_told_where_that_is() -> None:
    engine, *_ = zeroshard.initialize(model=Stack(), config=CONFIG)
    for call in (zeroshard.full_state_dict, zeroshard.drain):
        with pytest.raises(UsageError, match=r"Engine is not sharded: .* or engine\.module"):
            call(engine)
    assert zeroshard.full_state_dict(engine.module)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)), r"1 \(LazyLinear\)"),
        (nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False)), r"1 \(LazyBatchNorm1d\)"),
    ],
)
def test_lazy_modules_are_refused_by_name_before_anything_is_sharded(model: nn.Module, name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} is lazy and has no parameters yet: run the model once"):
        zeroshard.shard(model, torch.optim.AdamW)
    with pytest.raises(PlanError, match=name):
        zeroshard.initialize(model=model, config=CONFIG)
    model(torch.ones(2, 4))
    model, _ = zeroshard.shard(model, torch.optim.AdamW)
    model(torch.ones(2, 4)).sum().backward()
