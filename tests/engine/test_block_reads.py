"""Losses made of whole parameters inside GatheredParameters, whose backward comes after the block."""

from __future__ import annotations

import copy

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
