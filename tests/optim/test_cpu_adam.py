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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_parameter_that_is_changed_between_steps_keeps_the_change(dtype: torch.dtype) -> None:
    parameter, untouched = (nn.Parameter(torch.linspace(1, 2, 8).to(dtype)) for _ in range(2))
    optimizer = zeroshard.CPUAdam([parameter, untouched], lr=1e-4)
    for step in range(4):
        parameter.grad, untouched.grad = torch.ones_like(parameter), torch.ones_like(parameter)
        if step == 2:
            with torch.no_grad():
                parameter[:3] = 5.0
        optimizer.step()
    masters = [optimizer.state[one]["master"] for one in (parameter, untouched)]
    torch.testing.assert_close(masters[0][:3], torch.full((3,), 5.0 - 2e-4), rtol=0, atol=1e-5)
    assert torch.equal(masters[0][3:], masters[1][3:]), "where nothing was changed the master keeps its precision"
    assert torch.equal(parameter, masters[0].to(dtype))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_to_torchs_adam_and_back(dtype: torch.dtype) -> None:
    """Each leg goes on where the other stopped; with 16 bits torch has no master, so rounding sets the bound."""
    kinds = [torch.optim.AdamW, zeroshard.CPUAdam, torch.optim.AdamW]
    reference, model = net(dtype), net(dtype)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    mine: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for leg, kind in enumerate(kinds):
        moved = kind(model.parameters(), lr=0.5)
        if leg:
            moved.load_state_dict(copy.deepcopy(mine.state_dict()))
            mine = moved
        train(model, mine, 2, first=2 * leg)
        train(reference, theirs, 2, first=2 * leg)
    assert_close(model, reference, rtol=0.0, atol=1e-6 if dtype == torch.float32 else 2e-2)


def test_coupled_decay_of_torchs_adam_stays_coupled() -> None:
    model = net()
    theirs = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    train(model, theirs, 1)
    mine = zeroshard.CPUAdam(model.parameters())
    mine.load_state_dict(theirs.state_dict())
    assert mine.param_groups[0]["decoupled"] is False
    assert mine.param_groups[0]["bias_correction"] is True


def test_float16_moments_of_torch_become_float32_and_a_master_begins() -> None:
    model = net(torch.float16)
    theirs = torch.optim.AdamW(model.parameters(), eps=1e-3)
    train(model, theirs, 1)
    mine = zeroshard.CPUAdam(model.parameters())
    mine.load_state_dict(theirs.state_dict())
    for parameter in model.parameters():
        state = mine.state[parameter]
        assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq", "master")} == {torch.float32}
    train(model, mine, 1, first=1)


def test_state_that_would_mean_something_else_is_refused() -> None:
    model, other = net(), nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 3))
    theirs = torch.optim.AdamW(other.parameters(), maximize=True)
    train(other, theirs, 1)
    mine = zeroshard.CPUAdam(model.parameters())
    with pytest.raises(UsageError, match=r"exp_avg of shape \(12, 7\) for a parameter of shape \(13, 7\)"):
        mine.load_state_dict(theirs.state_dict())
    assert not mine.state
    again = zeroshard.CPUAdam(other.parameters())
    again.load_state_dict(theirs.state_dict())
    with pytest.raises(UsageError, match="group 0 sets maximize"):
        again.step()


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
    with pytest.raises(PlanError, match=r"betas 0\.9: two numbers"):
        zeroshard.CPUAdam(net().parameters(), betas=0.9)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="lr 'x' must be a number"):
        zeroshard.CPUAdam(net().parameters(), lr="x")  # type: ignore[arg-type]
    for threads in (0, -1, 1.5):
        with pytest.raises(UsageError, match="threads="):
            zeroshard.CPUAdam(net().parameters(), threads=threads)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="can't be sharded: a plan keeps moments in float32"):
        zeroshard.CPUAdam(net().parameters(), moments=torch.bfloat16).source()


def test_it_becomes_adam_of_a_plan_when_it_is_sharded() -> None:
    assert zeroshard.CPUAdam(net().parameters()).source().name == "AdamW"
    assert zeroshard.CPUAdam(net().parameters(), adamw_mode=False).source().name == "Adam"
