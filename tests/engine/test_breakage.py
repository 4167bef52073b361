"""What users do to a sharded model from outside: it works as on an unsharded one, or one error says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import WIDTH, Batch, Task, square_loss
from tests.support.training import Setting, assert_same, build, shard_task, train_reference, train_sharded
from tests.support.zoo import Mlp, Stack
from zeroshard.errors import DivergenceError, PlanError, UsageError
from zeroshard.optim.optimizer import ShardedOptimizer

STAGES = (0, 1, 2, 3)
BF16 = zeroshard.Precision(param="bf16")


class _Output:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class _ObjectBlock(Mlp):
    def forward(self, x: _Output) -> _Output:  # type: ignore[override]
        return _Output(super().forward(x.value))


class _Objects(nn.Module):
    """Blocks and model return an object that only they know."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_ObjectBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> _Output:
        output = _Output(x)
        for block in self.blocks:
            output = block(output)
        return output


def _object_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.normal(3, WIDTH)).value.square().mean()


class _Lists(nn.Module):
    """Large parameters in lists that have no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.ParameterList([torch.randn(WIDTH, 1100) * 0.01, torch.randn(1100, WIDTH) * 0.01])
        self.lists = nn.ModuleList(nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.1]) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for item in self.large:
            x = x @ item
        for item in self.lists:
            assert isinstance(item, nn.ParameterList)
            x = x @ item[0]
        return x


def _two_forwards_in_autocast(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        model(batch.normal(3, WIDTH))
        return square_loss(model, batch)


RIGHT = {
    "objects": Task(_Objects, _object_loss),
    "parameter lists": Task(_Lists, square_loss),
    "autocast over two forwards": Task(Stack, _two_forwards_in_autocast),
}


def _trains(rank: int, world: int, name: str) -> None:
    reference = train_reference(RIGHT[name], Setting(), world, rank)
    for stage in STAGES:
        assert_same(train_sharded(RIGHT[name], Setting(plan=stage), rank).parameters, reference.parameters, f"{stage}")


@pytest.mark.parametrize("name", RIGHT)
def test_trains_as_unsharded(name: str) -> None:
    run_ranks(2, _trains, name)


def _follows(rank: int, world: int) -> None:
    """A load and an in-place change of bf16 parameters that rest whole reach the master weights."""
    for stage in (0, 1, 2):
        recipe = zeroshard.Recipe(sharding=zeroshard.STAGES[stage], precision=BF16)
        model, optimizer = zeroshard.shard(Stack(), torch.optim.AdamW, plan=recipe)
        _backward(model, rank)
        optimizer.step()
        model.load_state_dict({name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()})
        assert all(bool((value == 2.0).all()) for _, value in zeroshard.iterate_full_parameters(model)), stage
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        _backward(model, rank)
        optimizer.step()
        for name, value in zeroshard.iterate_full_parameters(model):
            assert bool(((value - 1.0).abs() < 0.1).all()), (stage, name)
        optimizer.zero_grad()
        _backward(model, rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(3.0)
        optimizer.step()
        for name, value in zeroshard.iterate_full_parameters(model):
            assert bool(((value - 3.0).abs() < 0.1).all()), (stage, name)


def _backward(model: nn.Module, rank: int) -> None:
    model(Batch(0, 0, rank).normal(3, WIDTH).to(next(model.parameters()).dtype)).float().square().mean().backward()


def test_changes_of_whole_parameters_reach_the_master_weights() -> None:
    run_ranks(2, _follows)


@dataclass(frozen=True)
class Break:
    """Something that is refused: what is done between backward and step of the second step, and the error's words."""

    do: Callable[[nn.Module, ShardedOptimizer], object]
    words: str
    stages: tuple[int, ...] = STAGES


def _first(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def _change(model: nn.Module, _: ShardedOptimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def _penalize(model: nn.Module, _: ShardedOptimizer) -> None:
    sum(parameter.abs().sum() for parameter in model.parameters()).backward()  # pyright: ignore


def _penalize_inside(model: nn.Module, optimizer: ShardedOptimizer) -> None:
    """Autograd would add the gradient to the parameter itself."""
    with zeroshard.GatheredParameters(model, modifier_rank=0):
        _penalize(model, optimizer)


def _replace_data(model: nn.Module, _: ShardedOptimizer) -> None:
    _first(model).data = torch.ones(3, WIDTH)


def _replace(model: nn.Module, _: ShardedOptimizer) -> object:
    model.register_parameter("extra", nn.Parameter(torch.ones(2)))
    return zeroshard.full_state_dict(model)


def _double(model: nn.Module, optimizer: ShardedOptimizer) -> object:
    optimizer.zero_grad()
    return model.double()(torch.ones(2, WIDTH).double())


def _resize(model: nn.Module, _: ShardedOptimizer) -> object:
    _first(model).data = torch.zeros(3, WIDTH)
    return model(torch.ones(2, WIDTH))


def _drop_one(model: nn.Module, _: ShardedOptimizer) -> None:
    _first(model).grad = None


def _drop_one_in_between(model: nn.Module, _: ShardedOptimizer) -> None:
    _first(model).grad = None
    _backward(model, 0)


def _hyper(key: str, value: object) -> Callable[[nn.Module, ShardedOptimizer], None]:
    def do(_: nn.Module, optimizer: ShardedOptimizer) -> None:
        optimizer.param_groups[0][key] = value

    return do


BREAKS = {
    "in place, where it is sharded": Break(_change, "values of parameter", (3,)),
    "a backward of a penalty by itself": Break(_penalize, "of a loss that did not come through|values of parameter"),
    "a backward of a penalty in a block": Break(_penalize_inside, "'.*' got a gradient of a loss that did not"),
    "other data": Break(_replace_data, "was given other data|values of parameter"),
    "another shape": Break(_resize, "has another shape than|values of parameter"),
    "another dtype": Break(_double, "is torch.float64 now|values of parameter"),
    "one gradient dropped": Break(_drop_one, "had its gradient taken away"),
    "one gradient dropped, and a backward after it": Break(_drop_one_in_between, "had its gradient taken away"),
    "a parameter added": Break(_replace, "was added or replaced"),
    "a group dropped": Break(lambda _, optimizer: optimizer.param_groups.clear(), "param_groups hold other parameters"),
    "a learning rate of NaN": Break(_hyper("lr", float("nan")), "has lr nan"),
    "a learning rate that is no number": Break(_hyper("lr", None), "has lr None, not a number"),
    "two learning rates": Break(_hyper("lr", torch.ones(2)), "has lr tensor.*, not a number"),
    "a learning rate of NaN in a tensor": Break(_hyper("lr", torch.tensor(float("nan"))), "has lr nan"),
    "one beta": Break(_hyper("betas", (0.9,)), "has betas \\(0.9,\\), not 2 numbers"),
    "a decay that is infinite": Break(_hyper("weight_decay", float("inf")), "has weight_decay inf"),
    "a decay taken out": Break(lambda _, optimizer: optimizer.param_groups[0].pop("weight_decay"), "no 'weight_decay'"),
    "maximize": Break(_hyper("maximize", True), "maximize was switched on"),
    "state_dict of the optimizer": Break(lambda _, optimizer: optimizer.state_dict(), "save_checkpoint"),
    "load_state_dict of the optimizer": Break(lambda _, optimizer: optimizer.load_state_dict({}), "load_checkpoint"),
    "state cleared": Break(lambda _, optimizer: optimizer.state.clear(), "no step would see it"),
    "state replaced": Break(lambda _, optimizer: setattr(optimizer, "state", {}), "no step would see it"),
    "the state of a parameter taken out": Break(
        lambda model, optimizer: optimizer.state.pop(_first(model), None), "no step would see it"
    ),
    "a moment replaced": Break(
        lambda model, optimizer: optimizer.state[_first(model)].update(exp_avg=torch.zeros(3)), "no step would see it"
    ),
    "state_dict": Break(lambda model, _: model.state_dict(), "full_state_dict", (3,)),
    "load_state_dict": Break(lambda model, _: model.load_state_dict({}, strict=False), "GatheredParameters", (3,)),
    "a copy": Break(lambda model, _: copy.deepcopy(model), "can't be copied"),
    "a norm limit of 0": Break(lambda model, _: zeroshard.clip_grad_norm_(model, 0.0), "must be above 0"),
    "a part sharded again": Break(
        lambda model, _: zeroshard.shard(nn.Sequential(model.get_submodule("blocks.1")), plan=0), "was sharded before"
    ),
}


def _breaks(rank: int, world: int, name: str) -> None:
    case = BREAKS[name]
    for stage in case.stages:
        plan = zeroshard.Recipe(zeroshard.STAGES[stage], policy=zeroshard.ExecutionPolicy(accumulate=True))
        model, optimizer = shard_task(Task(Stack, square_loss), Setting(plan=plan))
        _backward(model, rank)
        optimizer.step()
        optimizer.zero_grad()
        _backward(model, rank)
        with pytest.raises(UsageError, match=case.words):
            _do_and_step(case, model, optimizer)


def _do_and_step(case: Break, model: nn.Module, optimizer: ShardedOptimizer) -> None:
    case.do(model, optimizer)
    optimizer.step()


@pytest.mark.parametrize("name", BREAKS)
def test_is_refused_in_words(name: str) -> None:
    run_ranks(2, _breaks, name)


class _KeepsOutput(Stack):
    """Hands its output over on the side; autograd then reaches parameters before any output of the model."""

    def forward(self, x: torch.Tensor, select: tuple[int, ...] | None = None) -> None:  # type: ignore[override]
        self.output = self.head(super().forward(x, select))

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)


def _on_the_side(rank: int, world: int) -> None:
    for stage in STAGES:
        model, _ = zeroshard.shard(build(Task(_KeepsOutput, square_loss)), torch.optim.AdamW, plan=stage)
        model(Batch(0, 0, rank).normal(3, WIDTH))
        assert isinstance(model, _KeepsOutput)
        with pytest.raises(UsageError, match=r"got its gradient before that of any output"):
            model.output.square().mean().backward()


def test_gradients_that_would_be_lost_are_refused() -> None:
    run_ranks(2, _on_the_side)


def _unfrozen(rank: int, world: int) -> None:
    for stage in STAGES:
        model = Stack()
        _first(model).requires_grad_(False)
        model, _ = zeroshard.shard(model, torch.optim.AdamW, plan=stage)
        _first(model).requires_grad_(True)
        with pytest.raises(UsageError, match="was frozen when the model was sharded"):
            _backward(model, rank)


def test_unfreezing_is_refused() -> None:
    run_ranks(2, _unfrozen)


@pytest.mark.parametrize("norm", [-1.0, float("nan")])
def test_norm_limits_without_meaning_are_refused(norm: float) -> None:
    with pytest.raises(PlanError, match="clip_norm"):
        zeroshard.shard(Stack(), torch.optim.AdamW, plan=0, clip_norm=norm)


def _alone(rank: int, world: int) -> None:
    """One rank drops its gradients, so its step has nothing to exchange while the other waits for it."""
    model, optimizer = shard_task(Task(Stack, square_loss), Setting())
    with pytest.raises(DivergenceError, match="an optimizer step"):
        _train(model, optimizer, rank, dropped_on=0)


def _train(model: nn.Module, optimizer: ShardedOptimizer, rank: int, dropped_on: int) -> None:
    for _ in range(3):
        _backward(model, rank)
        if rank == dropped_on:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def test_ranks_that_wait_for_each_other_in_different_places_get_an_error() -> None:
    run_ranks(2, _alone, timeout=40)
