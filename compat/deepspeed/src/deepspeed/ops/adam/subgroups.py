"""Steps of CPUAdam whose state is kept by the number of a subgroup, and the way back from one.

A caller that moves pieces of a model through one parameter object steps each piece under its number. A step is undone
by Adam's formulas solved for what was before, from the gradient of that step: equal to what was, to float32 rounding.
Rejected: a copy of each piece's state before its step, which costs as much memory as the state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch

from zeroshard.errors import UsageError, ZeroShardError
from zeroshard.optim.adam.host_adam import CPUAdam

_SUBGROUPS = "subgroups"


class NoStepError(ZeroShardError, RuntimeError):
    """A subgroup has no step that could be undone."""


class SubgroupSteps(CPUAdam):
    """CPUAdam with DeepSpeed's `step_subgroup` and `rollback_subgroup`."""

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """One update of the parameter that has a gradient, with the state of this subgroup; `closure` as in `step`.

        Raises:
            UsageError: several parameters have a gradient, or none; or what `step` refuses.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameter, group, number = self._only()
        assert parameter.grad is not None
        self._update(parameter, parameter.grad, group, number, self.state[subgroup_id])  # pyright: ignore[reportArgumentType]
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Undo the last step of a subgroup, whose gradient the parameter still has; `closure` as in `step`.

        Raises:
            NoStepError: the subgroup has taken no step, or all of them are undone.
            UsageError: several parameters have a gradient, or none.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if subgroup_id not in self.state:  # pyright: ignore[reportUnnecessaryContains]
            raise NoStepError(
                f"Cannot rollback optimizer state for sub_group_id {subgroup_id}: it has taken no step; call "
                "step_subgroup() before"
            )
        state = self.state[subgroup_id]  # pyright: ignore[reportArgumentType]
        if not int(state["step"]):
            raise NoStepError(
                f"Cannot rollback sub_group_id {subgroup_id}: step count is 0, so all its steps are undone"
            )
        parameter, group, _ = self._only()
        assert parameter.grad is not None
        _undo(state.get("master", parameter), parameter.grad.float(), state, group)
        if "master" in state:
            parameter.copy_(state["master"])
            self._written[id(parameter)] = parameter._version
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As CPUAdam's, with the states of subgroups apart: torch takes a number there for that of a parameter."""
        states = cast("dict[Any, Any]", self.state)
        own = {number: states.pop(number) for number in [key for key in states if isinstance(key, int)]}
        try:
            found = super().state_dict()
        finally:
            states.update(own)
        return {**found, _SUBGROUPS: {number: dict(state) for number, state in own.items()}} if own else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As CPUAdam's, with the states of subgroups."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != _SUBGROUPS})
        for number, state in state_dict.get(_SUBGROUPS, {}).items():
            self.state[number] = {name: copy.deepcopy(value) for name, value in state.items()}

    def _only(self) -> tuple[torch.Tensor, dict[str, Any], int]:
        """The parameter that has a gradient, its group, and the number of that."""
        found = [
            (parameter, group, number)
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if len(found) != 1:
            raise UsageError(
                f"a step of a subgroup is that of one parameter; {len(found)} have a gradient: set the others' to None"
            )
        return found[0]


def _undo(values: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Set values, moments and the count of steps to what they were before the step of this gradient."""
    step, rate, decay, (beta1, beta2) = int(state["step"]), group["lr"], group["weight_decay"], group["betas"]
    first, second = state["exp_avg"], state["exp_avg_sq"]
    corrected = group["bias_correction"]
    scale1, scale2 = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
    values.add_((first.float() / scale1) / ((second.float() / scale2).sqrt() + group["eps"]), alpha=rate)
    if group["decoupled"]:
        values.div_(1 - rate * decay)
    else:
        grad = grad + decay * values
    first.copy_((first.float() - (1 - beta1) * grad) / beta1)
    second.copy_(((second.float() - (1 - beta2) * grad.square()) / beta2).clamp_min(0.0))
    state["step"] -= 1
