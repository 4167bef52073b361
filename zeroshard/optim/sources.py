"""A sharded optimizer before the model is sharded: its parameter groups, what the plan must count, and its updates.

Every optimizer becomes a Source, whether a config names it (`configured`), the user built it in torch (`clients`), or
it is one of zeroshard's own (`own_optimizers`). The update itself is made later, when the regions exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from zeroshard.arguments import need_kind
from zeroshard.errors import PlanError
from zeroshard.optim.adam.device_adam import DeviceAdam
from zeroshard.optim.adam.kernel_update import KernelUpdate
from zeroshard.optim.adam.streamed_adam import StreamedAdam
from zeroshard.optim.rules import ADAM, ADAMW, Rule
from zeroshard.optim.update_context import UpdateContext
from zeroshard.optim.updates import CompressedUpdate, DeviceUpdate, FlatUpdate, PiecewiseUpdate, UpdateMethod
from zeroshard.plan.placement import Blocks

ParamGroups = list[dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """An optimizer before the model is sharded.

    Attributes:
        groups: parameter groups; the dicts are those of the client's optimizer, so its schedulers change them.
        moments: number of state tensors per parameter.
        update: makes the update that the host controls.
        on_device: makes an update for a GPU for which the host does not wait; None if there is none.
        on_host: makes an update of state in host memory by the processor; None if there is none.
        streamed: makes an update as `on_device` for state that is copied through device buffers; its arguments are
            (context, buffers, elements per piece).
        passing: makes an update that the host controls of state that is copied through device buffers; its arguments
            are those of `streamed`.
        split_master: whether `on_device` supports master weights as the remainder beside bfloat16 parameters.
        blocks: the blocks in which it keeps moments in few bits, for suitable parameters; None if it does not.
        matrices: ids of the parameters that are updated as whole matrices, with one state tensor each.
        factor_ranks: ids of the parameters that are updated from low-rank factors, and the ranks of these.
        compressed: makes the update that averages momentum in compressed form; `update` is not used then.
        parameter_sums: number of float64 values per parameter that a step sums over the ranks.
        parameter_maxima: number of float64 values per parameter whose maximum over the ranks a compressed step takes.
        float64_exact: whether `update` and `on_host` compute in float64 for float64 parameters; the others never do.
        client: the user's optimizer; None if the config names one.
    """

    name: str
    groups: ParamGroups
    defaults: Mapping[str, Any]
    moments: int
    update: Callable[[UpdateContext], UpdateMethod]
    on_device: Callable[[UpdateContext], DeviceUpdate] | None = None
    on_host: Callable[[UpdateContext], PiecewiseUpdate] | None = None
    streamed: Callable[[UpdateContext, Sequence[torch.Tensor], int], StreamedAdam] | None = None
    passing: Callable[[UpdateContext, Sequence[torch.Tensor], int], PiecewiseUpdate] | None = None
    split_master: bool = False
    blocks: Blocks | None = None
    matrices: frozenset[int] = frozenset()
    factor_ranks: Mapping[int, int] = field(default_factory=dict)
    parameter_sums: int = 0
    parameter_maxima: int = 0
    compressed: Callable[[UpdateContext], CompressedUpdate] | None = None
    float64_exact: bool = False
    client: torch.optim.Optimizer | None = None


def rule_source(
    rule: Rule, parameters: Iterable[Any], hyper: Mapping[str, Any], client: torch.optim.Optimizer | None = None
) -> Source:
    """A source from an element-wise rule, over parameters or parameter groups (dicts with 'params').

    Args:
        parameters: not used if there is a `client`, whose groups are taken.
        hyper: hyper-parameters in place of the rule's defaults.

    Raises:
        PlanError: there are no parameters, or a hyper-parameter is out of range.
    """
    defaults = {**rule.defaults, **hyper}
    groups = as_groups(parameters) if client is None else client.param_groups
    for group in groups:
        fill_group(group, defaults)
        rule.check(group)
    on_device = rule in (ADAM, ADAMW) and find_spec("triton") is not None
    return Source(
        rule.name,
        groups,
        defaults,
        len(rule.state),
        lambda context: FlatUpdate(rule, context.regions, groups),
        on_host=lambda context: KernelUpdate(rule, context.regions, groups),
        on_device=(lambda context: DeviceAdam(rule, context.regions, context.device)) if on_device else None,
        streamed=(lambda context, buffers, numel: StreamedAdam(rule, context.regions, context.device, buffers, numel))
        if rule in (ADAM, ADAMW)
        else None,
        split_master=on_device,
        float64_exact=True,
        client=client,
    )


def as_groups(parameters: Iterable[Any]) -> ParamGroups:
    """Parameters or parameter groups as new groups. Raises PlanError if there are none."""
    items = list(parameters)
    members = [p for item in items for p in _members(item)]
    for member in members:
        need_kind(member, torch.Tensor, "the optimizer's parameters", "a parameter, or a group of them as a dict,")
    if not items:
        raise PlanError("the optimizer got no parameters: no parameter of the model requires a gradient")
    if not isinstance(items[0], dict):
        return [{"params": items}]
    groups = [dict(item) for item in items]
    for group in groups:
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    return groups


def _members(item: object) -> list[object]:
    """The parameters of a parameter group, or the parameter itself."""
    if not isinstance(item, dict):
        return [item]
    params = item.get("params")
    if params is None or isinstance(params, (torch.Tensor, str)) or not isinstance(params, Iterable):
        return [params]
    return list(params)


def check_parameters(source: Source, model: nn.Module) -> None:
    """Check that every parameter of the optimizer is the model's, and that none is there twice.

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


def fill_group(group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Set the hyper-parameters that a parameter group does not have to the defaults."""
    for key, value in defaults.items():
        group.setdefault(key, value)
