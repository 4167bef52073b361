"""Where a sharded optimizer comes from: one of our rules, or a torch optimizer that the user built.

Both become a Source: live parameter groups, how many state tensors the plan must count, and how to make the update once
the regions exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroshard.errors import PlanError, UsageError
from zeroshard.optim.regions import Region
from zeroshard.optim.rules import ADAM, ADAMW, PLAIN_SGD, SGD, Rule
from zeroshard.optim.updates import FlatUpdate, TorchUpdate, UpdateMethod

ELEMENTWISE: Mapping[type[torch.optim.Optimizer], int] = {
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


@dataclass(frozen=True)
class Source:
    """An optimizer before the model is sharded.

    Attributes:
        groups: parameter groups; the dicts are shared with the client's optimizer, so its schedulers reach ours.
        moments: state tensors per parameter.
        update: makes the update for the regions of this rank.
        rule: our rule that computes it, None for a torch optimizer that has none.
        client: the user's optimizer, None where the config names one.
    """

    name: str
    groups: ParamGroups
    defaults: Mapping[str, Any]
    moments: int
    update: Callable[[Sequence[Region]], UpdateMethod]
    rule: Rule | None = None
    client: torch.optim.Optimizer | None = None


def rule_source(rule: Rule, parameters: Iterable[Any], hyper: Mapping[str, Any]) -> Source:
    """A source from one of our rules, over parameters or parameter groups (dicts with 'params')."""
    items = list(parameters)
    groups = [dict(item) if isinstance(item, dict) else item for item in items]
    if not groups:
        raise PlanError("the optimizer got no parameters: no parameter of the model requires a gradient")
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    for group in groups:
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        _fill(group, {**rule.defaults, **hyper}, rule)
    return Source(
        rule.name, groups, {**rule.defaults, **hyper}, len(rule.state), lambda regions: FlatUpdate(rule, regions), rule
    )


def torch_source(optimizer: torch.optim.Optimizer, *, allow_untested: bool) -> Source:
    """A source from a torch optimizer that has not stepped yet; by a flat rule where one computes the same.

    Raises:
        UsageError: it has stepped already.
        PlanError: it is not known to be element-wise, and `allow_untested` is False.
    """
    kind, groups = type(optimizer), optimizer.param_groups
    if any(_stepped(state) for state in optimizer.state.values()):
        raise UsageError(f"the {kind.__name__} has stepped already and its state would be lost: shard before stepping")
    rule = flat_rule(optimizer)
    if rule is not None:
        for group in groups:
            _fill(group, rule.defaults, rule)
        return Source(
            kind.__name__,
            groups,
            rule.defaults,
            len(rule.state),
            lambda regions: FlatUpdate(rule, regions),
            rule,
            optimizer,
        )
    moments = check_elementwise(optimizer, allow_untested=allow_untested)
    defaults = optimizer.defaults
    return Source(
        kind.__name__,
        groups,
        defaults,
        moments,
        lambda regions: TorchUpdate(kind, defaults, regions, groups),
        client=optimizer,
    )


def _stepped(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state is more than what Adagrad's constructor already makes."""
    return bool(state) and float(state.get("step", 1)) > 0


def flat_rule(optimizer: torch.optim.Optimizer) -> Rule | None:
    """Our rule that computes what a torch optimizer does, None if there is none."""
    groups, kind = optimizer.param_groups, type(optimizer)
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
    """State tensors per parameter of a torch optimizer that may run on slices of parameters.

    Raises:
        PlanError: the optimizer is not known to be element-wise, and `allow_untested` is False.
    """
    known = ELEMENTWISE.get(type(optimizer))
    if known is not None:
        return known + (1 if any(group.get("amsgrad") for group in optimizer.param_groups) else 0)
    if allow_untested:
        return 2
    names = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
    raise PlanError(
        f"optimizer {type(optimizer).__name__} is not known to be element-wise, so it can't run on sharded state. "
        f"Known: {names}. If each element's update depends on that element alone, allow it with "
        "zero_allow_untested_optimizer (config) or allow_untested=True (shard)"
    )


def check_parameters(source: Source, model: nn.Module) -> None:
    """Every parameter of the optimizer must be the model's own, each once.

    Raises:
        PlanError: a parameter is not the model's or is there twice, or none requires a gradient.
    """
    owned = {id(parameter) for parameter in model.parameters()}
    seen: set[int] = set()
    trained = 0
    for number, group in enumerate(source.groups):
        for parameter in group["params"]:
            if id(parameter) not in owned:
                raise PlanError(
                    f"optimizer group {number} holds a parameter of shape {tuple(parameter.shape)} that is not the "
                    "model's; build the optimizer from model.parameters() of the model that you pass"
                )
            if id(parameter) in seen:
                raise PlanError(f"optimizer group {number} holds a parameter that another group holds already")
            seen.add(id(parameter))
            trained += parameter.requires_grad
    if not trained:
        raise PlanError("the optimizer has no parameter that requires a gradient: nothing could be trained")


def _fill(group: dict[str, Any], defaults: Mapping[str, Any], rule: Rule) -> None:
    for key, value in defaults.items():
        group.setdefault(key, value)
    rule.check(group)
