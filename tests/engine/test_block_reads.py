"""Losses made of whole parameters inside GatheredParameters, whose backward comes after the block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.training import assert_close, full_parameters
from zeroshard.errors import UsageError

PENALTIES = ("abs", "square", "norm", "normed together", "flat", "product", "frozen times an input", "with the output")


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].bias.requires_grad_(False)
    return model


def _penalty(kind: str, model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weight: torch.Tensor = model[0].weight
    if kind == "abs":
        return torch.stack([parameter.abs().sum() for parameter in parameters]).sum()
    if kind == "square":
        return torch.stack([(parameter * parameter).sum() for parameter in parameters]).sum()
    if kind == "norm":
        return torch.linalg.vector_norm(torch.stack([parameter.norm(1) for parameter in parameters]))
    if kind == "normed together":
        return torch.cat([parameter.flatten() for parameter in parameters]).abs().max()
    if kind == "flat":
        return torch.nn.utils.parameters_to_vector(parameters).abs().sum()
    if kind == "product":
        return F.linear(weight, model[2].weight).abs().sum()
    if kind == "frozen times an input":
        return (weight * model[2].bias.sign()).sum() + (model[2].bias.abs() * weight).sum()
    return weight.abs().sum() + model(x).square().sum()


def _train(rank: int, world: int) -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 8)
    for kind in PENALTIES:
        plain = _model()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        (_penalty(kind, plain, x) + plain(x).square().mean()).backward()
        optimizer.step()
        expected = {name: value.detach() for name, value in plain.named_parameters()}
        for stage in range(4):
            mine = _model()
            model, sharded = zeroshard.shard(mine, torch.optim.SGD(mine.parameters(), lr=0.1), plan=stage)
            with zeroshard.GatheredParameters(model):
                penalty = _penalty(kind, model, x)
            assert sharded is not None
            (penalty + model(x).square().mean()).backward()
            sharded.step()
            assert_close(full_parameters(model), expected, what=f"{kind}, stage {stage}")
            zeroshard.close(model)


def test_their_gradients_are_those_of_plain_torch() -> None:
    run_ranks(2, _train)


class _Marked(nn.Parameter):
    """A class of parameters of a library's own."""


class _Tripled(nn.Parameter):
    """A class that gives an operation another meaning, by an attribute."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            answer = func(*args, **(kwargs or {}))
            return answer * args[0].factor if func is torch.Tensor.abs else answer


class _Listed(list[torch.Tensor]):
    """A class of lists, which torch takes as it takes a list."""


def _of_class(kind: type[nn.Parameter]) -> nn.Sequential:
    model = _model()
    model[0].weight = kind(model[0].weight.detach())
    model[0].weight.factor = 3.0
    return model


def _in_place(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    made = torch.ones_like(first) * second
    made.mul_(first)
    made *= second
    made.addcmul_(first, second)
    return made.lerp_(first, second).sum()


def _mapped(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    rows = torch.vmap(lambda one, other: (one * other.abs()).abs().sum(), (0, 1))(first, second)
    return rows.sum() + torch.vmap(lambda row: row.abs().sum())(first).sum()


def _slope(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    slopes = torch.func.grad(lambda one, other: (one.abs() * one * other).sum(), (0, 1))(first, second)
    return torch.stack(slopes).square().sum()


_LATER: dict[str, tuple[Callable[[], nn.Sequential], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "in place on other tensors": (_model, _in_place),
    "vmap": (_model, _mapped),
    "torch.func.grad": (_model, _slope),
    "a list of a class of its own": (_model, lambda *both: torch.stack(_Listed(both)).abs().sum()),
    "class of parameters": (partial(_of_class, _Marked), lambda one, other: (one.abs() * other).sum()),
    "class with operations": (partial(_of_class, _Tripled), lambda one, other: (one.abs() * other).sum()),
}


def _train_with_later_nodes(rank: int, world: int) -> None:
    x = torch.ones(4, 8)
    for kind, (build, penalty) in _LATER.items():
        plain, mine = build(), build()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        (plain(x).square().mean() + penalty(plain[0].weight, plain[2].weight)).backward()
        optimizer.step()
        model, sharded = zeroshard.shard(mine, torch.optim.SGD(mine.parameters(), lr=0.1), plan=3)
        loss = model(x).square().mean()  # its backward begins when that of the penalty has read what it needs
        with zeroshard.GatheredParameters(model):
            of_block = penalty(model[0].weight, model[2].weight)
        (loss + of_block).backward()
        sharded.step()
        assert_close(
            full_parameters(model), {name: value.detach() for name, value in plain.named_parameters()}, what=kind
        )
        zeroshard.close(model)


def test_gradients_of_transforms_in_place_operations_and_parameter_classes_are_those_of_plain_torch() -> None:
    run_ranks(2, _train_with_later_nodes)


def _parameters_in_a_block(rank: int, world: int) -> None:
    mine = _model()
    model, _ = zeroshard.shard(mine, torch.optim.SGD(mine.parameters(), lr=0.1), plan=3)
    weight: nn.Parameter = model[0].weight
    with zeroshard.GatheredParameters(weight, modifier_rank=0):
        assert type(weight) is nn.Parameter
        assert weight.contiguous() is weight
        assert weight.to(weight.device) is weight
        assert weight.float() is weight
        assert type(copy.deepcopy(weight)) is nn.Parameter
        assert repr(weight).startswith("Parameter containing")
        node = weight.view_as(weight).grad_fn
        assert node is not None
        assert node.next_functions[0][0].name().endswith("AccumulateGrad")
        expected = weight.detach().sign()
        (gradient,) = torch.autograd.grad(weight.abs().sum(), weight)
        assert torch.equal(gradient, expected)
        assert torch.equal(torch.func.grad(lambda value: value.abs().sum())(weight), expected)
        compiled = torch.compile(lambda value: F.linear(value, weight).sum(), fullgraph=True, backend="eager")
        assert torch.isfinite(compiled(torch.ones(2, 8)))
        kept = weight.abs().sum()
        with torch.no_grad():
            nn.init.zeros_(weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()
    assert not full_parameters(model)["0.weight"].any(), "the change inside is kept"


def test_what_code_sees_of_a_parameter_in_a_block_is_the_parameter() -> None:
    run_ranks(2, _parameters_in_a_block)


def _blocks_that_overlap(rank: int, world: int) -> None:
    mine = _model()
    model, _ = zeroshard.shard(mine, torch.optim.SGD(mine.parameters(), lr=0.1), plan=3)
    first, second = zeroshard.GatheredParameters(model[0]), zeroshard.GatheredParameters(model[2])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # before the one that began later
    loss = model[2].weight.abs().sum()
    second.__exit__(None, None, None)
    assert torch.isfinite(loss)
    with pytest.raises(UsageError, match=r"values of parameter '2\.weight' are not here"):
        model[2].weight.abs()
    with zeroshard.GatheredParameters(model):
        assert model[2].weight.abs().sum() == loss


def test_blocks_may_end_in_the_order_in_which_they_began() -> None:
    run_ranks(2, _blocks_that_overlap)
