"""CPUAdam alone: torch's Adam and AdamW to rounding, with 16-bit parameters beside a master, saved and loaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.errors import PlanError, UsageError

HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        model(x).square().mean().backward()
        optimizer.step()


def assert_close(one: nn.Module, other: nn.Module, rtol: float, atol: float) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("decoupled", [True, False])
def test_it_is_torchs_adam_to_rounding(decoupled: bool) -> None:
    mine, theirs = net(), net()
    train(mine, zeroshard.CPUAdam(mine.parameters(), adamw_mode=decoupled, **HYPER), 10)
    reference = torch.optim.AdamW if decoupled else torch.optim.Adam
    train(theirs, reference(theirs.parameters(), **HYPER), 10)
    assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_groups_schedules_and_missing_gradients_are_torchs() -> None:
    models = net(), net()
    for model, kind in zip(models, (zeroshard.CPUAdam, torch.optim.AdamW), strict=True):
        layers = [layer for layer in model.children() if isinstance(layer, nn.Linear)]
        groups = [{"params": layers[0].parameters(), "lr": 1e-3}, {"params": layers[1].parameters(), "eps": 1e-3}]
        optimizer = kind(groups, **HYPER)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            layers[0].requires_grad_(step != 1)
            train(model, optimizer, 1, first=step)
            schedule.step()
    assert_close(*models, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_parameter_is_its_float32_master_rounded(dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer = zeroshard.CPUAdam(model.parameters(), lr=1e-5)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, 3)
    for parameter, start in zip(model.parameters(), before, strict=True):
        master = optimizer.state[parameter]["master"]
        assert torch.equal(parameter, master.to(dtype))
        assert not torch.equal(master, start.float())  # although most steps are too small for 16 bits


def test_bfloat16_moments_take_half_and_train() -> None:
    model, reference = net(), net()
    optimizer = zeroshard.CPUAdam(model.parameters(), moments=torch.bfloat16, **HYPER)
    train(model, optimizer, 5)
    train(reference, torch.optim.AdamW(reference.parameters(), **HYPER), 5)
    assert {optimizer.state[p][name].dtype for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")} == {
        torch.bfloat16
    }
    assert_close(model, reference, rtol=0.0, atol=5e-3)


def test_a_parameter_that_is_not_contiguous_is_updated_where_it_is() -> None:
    models = net(), net()
    for model, kind in zip(models, (zeroshard.CPUAdam, torch.optim.AdamW), strict=True):
        layer = next(iter(model.children()))
        assert isinstance(layer, nn.Linear)
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        train(model, kind(model.parameters(), **HYPER), 3)
        assert not layer.weight.is_contiguous()
    assert_close(*models, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer = zeroshard.CPUAdam(model.parameters(), **HYPER)
    train(model, optimizer, 3)
    again = copy.deepcopy(model)
    loaded = zeroshard.CPUAdam(again.parameters(), **HYPER)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 3, first=3)
    train(again, loaded, 3, first=3)
    assert_close(model, again, rtol=0.0, atol=0.0)


def test_the_closure_is_called_and_its_loss_returned() -> None:
    model = net()
    optimizer = zeroshard.CPUAdam(model.parameters())

    def closure() -> torch.Tensor:
        loss = model(torch.ones(1, 7)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0


def test_what_it_can_not_step_is_refused() -> None:
    double = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    double.grad = torch.zeros_like(double)
    with pytest.raises(UsageError, match=r"group 0: a parameter of shape \(2,\) is torch.float64"):
        zeroshard.CPUAdam([double]).step()
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse gradient"):
        zeroshard.CPUAdam(embedding.parameters()).step()
    with pytest.raises(UsageError, match=r"moments=torch.float16"):
        zeroshard.CPUAdam(net().parameters(), moments=torch.float16)
    with pytest.raises(PlanError, match="betas"):
        zeroshard.CPUAdam(net().parameters(), betas=(1.0, 0.9))
    with pytest.raises(PlanError, match="steps alone only"):
        zeroshard.CPUAdam(net().parameters(), moments=torch.bfloat16).source()


def test_it_becomes_adam_of_a_plan_when_it_is_sharded() -> None:
    assert zeroshard.CPUAdam(net().parameters()).source().name == "AdamW"
    assert zeroshard.CPUAdam(net().parameters(), adamw_mode=False).source().name == "Adam"
