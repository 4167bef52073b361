"""Optimizers that update matrices in a way of their own, and other parameters by AdamW: what Muon and Dion share.

Each optimizer group says by a mark (`use_muon`, `use_dion`) whether it is of matrices. In the plan matrices have flat
groups of their own, so that a region has parameters of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.arguments import need_kind
from zeroshard.errors import PlanError
from zeroshard.optim.adam.device_adam import DeviceAdam
from zeroshard.optim.parts import DeviceParts, HostParts, part_of
from zeroshard.optim.rules import ADAMW, check_common
from zeroshard.optim.sources import ParamGroups, fill_group
from zeroshard.optim.update_context import UpdateContext
from zeroshard.optim.updates import DeviceUpdate, FlatUpdate, HostDriven, UpdateMethod
from zeroshard.sharding.unowned import whole_shape

ADAM_DEFAULTS: Mapping[str, Any] = {
    "lr": 3e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-10,
    "weight_decay": 0.0,
    "bias_correction": True,
    "decoupled": True,
}
NOT_HIDDEN = ("embed", "lm_head")
"""Matrices with one of these in their names are updated by Adam, as in DeepSpeed."""


@dataclass(frozen=True)
class MatrixKind:
    """A way to update matrices.

    Attributes:
        mark: option of an optimizer group, and attribute of a parameter, that says whether it is of matrices.
        field: field of Recipe that names the matrices.
        defaults: hyper-parameters of groups of matrices.
        check: raises PlanError for those out of range.
        update: makes the update of regions of matrices.
    """

    mark: str
    field: str
    defaults: Mapping[str, Any]
    check: Callable[[Mapping[str, Any]], None]
    update: Callable[[UpdateContext], DeviceUpdate]


def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is updated as a matrix by default: two dims or more, and no embedding or head by name."""
    return len(whole_shape(parameter)) >= 2 and not any(part in name.lower() for part in NOT_HIDDEN)


def split_groups(
    kind: MatrixKind,
    groups: Iterable[Mapping[str, Any]],
    names: Mapping[int, str],
    matrix: Mapping[str, Any],
    other: Mapping[str, Any],
) -> ParamGroups:
    """Split each group into one of hidden matrices and one of other parameters, without empty groups.

    Args:
        names: the parameters' names by id. A parameter's attribute `kind.mark`, if set, decides instead of its name and
            shape.
        matrix, other: options that are added to groups of hidden matrices, and to other groups.
    """
    found: ParamGroups = []
    for group in groups:
        kinds: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for parameter in group["params"]:
            marked = vars(parameter).get(kind.mark)
            hidden = is_hidden_matrix(names.get(id(parameter), ""), parameter) if marked is None else bool(marked)
            kinds[hidden].append(parameter)
        given = {key: value for key, value in group.items() if key != "params"}
        for hidden, members in kinds.items():
            if members:
                options = matrix if hidden else other
                found.append({**options, **given, "params": members, kind.mark: hidden})
    return found


def given_groups(
    kind: MatrixKind, params: Iterable[Any], name: str, matrix: Mapping[str, Any], other: Mapping[str, Any]
) -> list[Any]:
    """The argument `params` of optimizer `name`, with the options of its kind in each group.

    Names with parameters are split by `split_groups`; parameters without names and groups are left to `check_groups`.
    """
    need_kind(params, Iterable, name, "an iterable of parameters, of groups, or of names with parameters,")
    items = list(params)
    if items and isinstance(items[0], tuple):
        names = {id(parameter): name for name, parameter in items}
        return list(split_groups(kind, [{"params": [parameter for _, parameter in items]}], names, matrix, other))
    if items and isinstance(items[0], dict):
        return [{**(matrix if group.get(kind.mark) else other), **group} for group in items]
    return items


def check_groups(kind: MatrixKind, groups: ParamGroups) -> frozenset[int]:
    """Fill the groups with defaults; returns the ids of the matrices.

    Raises:
        PlanError: a group does not say whether it is of matrices, has vectors as matrices, or has hyper-parameters out
            of range.
    """
    matrices: set[int] = set()
    for number, group in enumerate(groups):
        if not isinstance(group.get(kind.mark), bool):
            raise PlanError(
                f"optimizer group {number} does not say whether it is of matrices: give each group '{kind.mark}': True "
                "or False"
            )
        fill_group(group, kind.defaults if group[kind.mark] else ADAM_DEFAULTS)
        check_common(group)
        if not group[kind.mark]:
            ADAMW.check(group)
            continue
        kind.check(group)
        for parameter in group["params"]:
            if len(whole_shape(parameter)) < 2:
                raise PlanError(
                    f"optimizer group {number} has '{kind.mark}': True and a parameter of shape "
                    f"{tuple(parameter.shape)}, which is no matrix; put it into a group with '{kind.mark}': False"
                )
        matrices |= {id(parameter) for parameter in group["params"]}
    return frozenset(matrices)


def host_update(kind: MatrixKind, context: UpdateContext, groups: ParamGroups) -> UpdateMethod:
    """The update that the host controls."""
    matrices, others = _divided(kind, context, groups)
    return HostParts(
        [
            part_of("matrices", context, matrices, lambda part: HostDriven(kind.update(part), part.device)),
            part_of("others", context, others, lambda part: FlatUpdate(ADAMW, part.regions)),
        ]
    )


def device_update(kind: MatrixKind, context: UpdateContext, groups: ParamGroups) -> DeviceUpdate:
    """The update without host decisions: of matrices, and Adam for other parameters."""
    matrices, others = _divided(kind, context, groups)
    return DeviceParts(
        [
            part_of("matrices", context, matrices, kind.update),
            part_of("others", context, others, lambda part: DeviceAdam(ADAMW, part.regions, part.device)),
        ],
        context.regions,
        context.device,
    )


def _divided(kind: MatrixKind, context: UpdateContext, groups: ParamGroups) -> tuple[list[int], list[int]]:
    """The numbers of the context's regions of matrices, and of the others."""
    matrices: list[int] = []
    others: list[int] = []
    for number, region in enumerate(context.regions):
        kinds = {bool(groups[group][kind.mark]) for group in region.groups if group >= 0}
        if len(kinds) == 2:
            raise PlanError(
                f"the plan keeps matrices and other parameters of {region.label} in one flat group; name the matrices "
                f"in Recipe({kind.field}=...), or let zeroshard make the plan"
            )
        (matrices if kinds == {True} else others).append(number)
    return matrices, others
