"""DeepSpeedCPUAdam keeps state by the number of a subgroup, and undoes a step to float32 rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

STEPS = 3


def _gradient(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(64, generator=torch.Generator().manual_seed(step)).to(dtype)


def _made(dtype: torch.dtype, **hyper: Any) -> tuple[nn.Parameter, DeepSpeedCPUAdam]:
    parameter = nn.Parameter(_gradient(100, dtype))
    return parameter, DeepSpeedCPUAdam([parameter], lr=0.05, **hyper)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hyper", [{"weight_decay": 0.1}, {"weight_decay": 0.1, "adamw_mode": False}, {}], ids=str)
def test_steps_of_a_subgroup_are_those_of_the_optimizer_and_can_be_undone(
    dtype: torch.dtype, hyper: dict[str, Any]
) -> None:
    plain, optimizer = _made(dtype, **hyper)
    parameter, by_number = _made(dtype, **hyper)
    before = [parameter.detach().float().clone()]
    for step in range(STEPS):
        plain.grad = parameter.grad = _gradient(step, dtype)
        optimizer.step()
        by_number.step_subgroup(7)
        assert torch.equal(plain, parameter)
        before.append(parameter.detach().float().clone())
    state = by_number.state[7]  # pyright: ignore[reportArgumentType]
    for step in reversed(range(STEPS)):
        parameter.grad = _gradient(step, dtype)
        by_number.rollback_subgroup(7)
        assert int(state["step"]) == step
        torch.testing.assert_close(parameter.detach().float(), before[step], rtol=1e-2, atol=2e-4)
        torch.testing.assert_close(state.get("master", parameter).detach(), before[step], rtol=1e-2, atol=2e-4)
    assert float(state["exp_avg"].abs().max()) < 1e-5


def test_subgroups_have_states_of_their_own() -> None:
    parameter, optimizer = _made(torch.float32)
    parameter.grad = _gradient(0, torch.float32)
    for number in (0, 1, 0):
        optimizer.step_subgroup(number)
    assert [int(optimizer.state[number]["step"]) for number in (0, 1)] == [2, 1]  # pyright: ignore[reportArgumentType]


def test_a_saved_state_goes_on_with_its_subgroups() -> None:
    for number in (0, 5):  # 0 is the index of a parameter, too
        parameter, optimizer = _made(torch.float32)
        other, resumed = _made(torch.float32)
        parameter.grad = _gradient(0, torch.float32)
        optimizer.step_subgroup(number)
        resumed.load_state_dict(optimizer.state_dict())
        with torch.no_grad():
            other.copy_(parameter)
        parameter.grad = other.grad = _gradient(1, torch.float32)
        optimizer.step_subgroup(number)
        resumed.step_subgroup(number)
        assert torch.equal(parameter, other)
        assert not resumed.state[other]


def test_what_can_t_be_undone_is_refused_by_number() -> None:
    parameter, optimizer = _made(torch.float32)
    with pytest.raises(RuntimeError, match="sub_group_id 3: it has taken no step"):
        optimizer.rollback_subgroup(3)
    parameter.grad = _gradient(0, torch.float32)
    optimizer.step_subgroup(3)
    optimizer.rollback_subgroup(3)
    with pytest.raises(RuntimeError, match="sub_group_id 3: step count is 0"):
        optimizer.rollback_subgroup(3)
    parameter.grad = None
    with pytest.raises(ValueError, match="0 have a gradient"):
        optimizer.step_subgroup(3)
