"""The optimizer that the user holds: a real torch.optim.Optimizer whose step runs on the sharded state.

`param_groups` are live: they hold the user's own parameters and hyper-parameters, and schedulers write to them. The
arithmetic is done by an UpdateMethod on the regions of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from zeroshard.errors import PlanError, UsageError
from zeroshard.optim.rules import ADAM, ADAMW, PLAIN_SGD, SGD, Rule

ELEMENTWISE = {
    torch.optim.Adam: 2,
    torch.optim.AdamW: 2,
    torch.optim.SGD: 1,
    torch.optim.Adagrad: 1,
    torch.optim.Adadelta: 2,
    torch.optim.Adamax: 2,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 2,
    torch.optim.RMSprop: 1,
    torch.optim.Rprop: 2,
    torch.optim.ASGD: 1,
}
"""Torch optimizers whose update of an element depends on that element alone, and their state tensors per parameter."""

ParamGroups = list[dict[str, Any]]


class StepHandler(Protocol):
    """Who runs a step when `optimizer.step()` is called."""

    def step(self, optimizer: ShardedOptimizer) -> None: ...

    def zero_grad(self) -> None: ...


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps sharded state; made by `zeroshard.shard` and `zeroshard.initialize`.

    Differences to other optimizers: `step` consumes the gradients, `state` is empty (the state is flat and sharded),
    and parameters can't be added later.
    """

    def __init__(self, groups: ParamGroups, defaults: Mapping[str, Any], handler: StepHandler, name: str) -> None:
        self._handler = handler
        self._sealed = False
        self.name = name
        super().__init__(groups, dict(defaults))
        self._sealed = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update from the gradients of the backwards since the last step."""
        if closure is not None:
            raise UsageError("step(closure): the gradients are reduced in the backward; call backward before step")
        self._handler.step(self)
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all backwards since the last step."""
        self._handler.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._sealed:
            raise UsageError(
                "parameters can't be added to a sharded optimizer; pass all groups to shard()/initialize()"
            )
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"Sharded{super().__repr__()}"


def flat_rule(optimizer: torch.optim.Optimizer) -> Rule | None:
    """Our flat rule for a torch optimizer that it computes the same as, None if there is none."""
    groups = optimizer.param_groups
    kind = type(optimizer)
    if any(group.get("maximize") or group.get("differentiable") or group.get("amsgrad") for group in groups):
        return None
    if any(isinstance(group["lr"], torch.Tensor) for group in groups):
        return None
    if kind is torch.optim.AdamW:
        return ADAMW
    if kind is torch.optim.Adam:
        return ADAMW if all(group.get("decoupled_weight_decay") for group in groups) else ADAM
    if kind is torch.optim.SGD:
        return SGD if any(group["momentum"] for group in groups) else PLAIN_SGD
    return None


def check_elementwise(optimizer: torch.optim.Optimizer, *, allow_untested: bool) -> int:
    """State tensors per parameter of a torch optimizer that may run on slices.

    Raises:
        PlanError: the optimizer is not known to be element-wise, and `allow_untested` is False.
    """
    known = ELEMENTWISE.get(type(optimizer))
    if known is not None:
        amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
        return known + (1 if amsgrad else 0)
    if allow_untested:
        return 2
    names = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
    raise PlanError(
        f"optimizer {type(optimizer).__name__} is not known to be element-wise, so it can't run on sharded state. "
        f"Known: {names}. If each element's update depends on that element alone, allow it with "
        "zero_allow_untested_optimizer (config) or allow_untested=True (shard)"
    )


def rule_groups(rule: Rule, groups: Iterable[Mapping[str, Any]]) -> ParamGroups:
    """Parameter groups with the rule's defaults filled in and checked."""
    made = [{**rule.defaults, **group} for group in groups]
    for group in made:
        rule.check(group)
    return made


def check_parameters(groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> None:
    """Every optimizer parameter must be one of the model's (by identity).

    Raises:
        PlanError: a parameter is not the model's, or the optimizer has none that requires a gradient.
    """
    count = 0
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise PlanError(
                    f"optimizer group {number} holds a parameter of shape {tuple(parameter.shape)} that is not the "
                    "model's; build the optimizer from model.parameters() of the model that you pass"
                )
            count += parameter.requires_grad
    if not count:
        raise PlanError("the optimizer has no parameter that requires a gradient: nothing could be trained")
