"""Muon as a source: which parameters are matrices, and the two updates, for matrices and for all other parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.adam.device_adam import DeviceAdam
from zeroshard.optim.muon.newton_schulz import COEFFICIENTS, check_method
from zeroshard.optim.muon.update import MatrixUpdate
from zeroshard.optim.parts import DeviceParts, HostParts, part_of
from zeroshard.optim.rules import ADAMW, check_common
from zeroshard.optim.sources import ParamGroups, Source, fill_group
from zeroshard.optim.update_context import UpdateContext
from zeroshard.optim.updates import DeviceUpdate, FlatUpdate, HostDriven, UpdateMethod
from zeroshard.sharding.unowned import whole_shape

MATRIX_DEFAULTS: Mapping[str, Any] = {
    "lr": 0.02,
    "momentum": 0.95,
    "weight_decay": 0.0,
    "nesterov": True,
    "ns_method": "standard",
    "ns_steps": 5,
    "ns_coefficients": COEFFICIENTS,
    "eps": 1e-7,
    "adjust_lr_fn": None,
}
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
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is updated as a matrix by default: two dims or more, and no embedding or head by name."""
    return len(whole_shape(parameter)) >= 2 and not any(part in name.lower() for part in NOT_HIDDEN)


def split_groups(
    groups: Iterable[Mapping[str, Any]],
    names: Mapping[int, str],
    matrix: Mapping[str, Any],
    other: Mapping[str, Any],
) -> ParamGroups:
    """Split each group into one of hidden matrices and one of other parameters, without empty groups.

    Args:
        names: the parameters' names by id. A parameter's attribute `use_muon`, if set, decides instead of its name and
            shape.
        matrix, other: options that are added to groups of hidden matrices, and to other groups.
    """
    found: ParamGroups = []
    for group in groups:
        kinds: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for parameter in group["params"]:
            marked = vars(parameter).get("use_muon")
            hidden = is_hidden_matrix(names.get(id(parameter), ""), parameter) if marked is None else bool(marked)
            kinds[hidden].append(parameter)
        given = {key: value for key, value in group.items() if key != "params"}
        for use_muon, members in kinds.items():
            if members:
                options = matrix if use_muon else other
                found.append({**options, **given, "params": members, "use_muon": use_muon})
    return found


def muon_source(groups: ParamGroups, name: str, client: torch.optim.Optimizer | None = None) -> Source:
    """A source over groups that say by `use_muon` how they are updated.

    Raises:
        PlanError: a group does not say it, has vectors as matrices, or has hyper-parameters out of range.
    """
    matrices: set[int] = set()
    for number, group in enumerate(groups):
        if not isinstance(group.get("use_muon"), bool):
            raise PlanError(
                f"optimizer group {number} does not say whether it is of matrices: give each group 'use_muon': True or "
                "False"
            )
        fill_group(group, MATRIX_DEFAULTS if group["use_muon"] else ADAM_DEFAULTS)
        check_common(group)
        if group["use_muon"]:
            _check_matrices(number, group)
            matrices |= {id(parameter) for parameter in group["params"]}
        else:
            ADAMW.check(group)
    return Source(
        name,
        groups,
        {},
        2,
        lambda context: _host_update(context, groups),
        on_device=(lambda context: device_update(context, groups)) if find_spec("triton") is not None else None,
        matrices=frozenset(matrices),
        client=client,
    )


def _check_matrices(number: int, group: Mapping[str, Any]) -> None:
    check_method(group)
    if not 0.0 <= group["momentum"] <= 1.0:
        raise PlanError(f"optimizer momentum {group['momentum']!r}: a number from 0 to 1 is needed")
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise PlanError(f"optimizer adjust_lr_fn {group['adjust_lr_fn']!r}: it is 'original' or 'match_rms_adamw'")
    for parameter in group["params"]:
        if len(whole_shape(parameter)) < 2:
            raise PlanError(
                f"optimizer group {number} has 'use_muon': True and a parameter of shape {tuple(parameter.shape)}, "
                "which is no matrix; put it into a group with 'use_muon': False"
            )


def _divided(context: UpdateContext, groups: ParamGroups) -> tuple[list[int], list[int]]:
    """The numbers of the context's regions of matrices, and of the others."""
    matrices: list[int] = []
    others: list[int] = []
    for number, region in enumerate(context.regions):
        kinds = {bool(groups[group]["use_muon"]) for group in region.groups if group >= 0}
        if len(kinds) == 2:
            raise PlanError(
                f"the plan keeps matrices and other parameters of {region.label} in one flat group; name the matrices "
                "in Recipe(matrices=...), or let zeroshard make the plan"
            )
        (matrices if kinds == {True} else others).append(number)
    return matrices, others


def _host_update(context: UpdateContext, groups: ParamGroups) -> UpdateMethod:
    matrices, others = _divided(context, groups)
    return HostParts(
        [
            part_of("matrices", context, matrices, lambda part: HostDriven(MatrixUpdate(part), part.device)),
            part_of("others", context, others, lambda part: FlatUpdate(ADAMW, part.regions)),
        ]
    )


def device_update(context: UpdateContext, groups: ParamGroups) -> DeviceUpdate:
    """The update without host decisions: Muon for matrices, and Adam for other parameters."""
    matrices, others = _divided(context, groups)
    return DeviceParts(
        [
            part_of("matrices", context, matrices, MatrixUpdate),
            part_of("others", context, others, lambda part: DeviceAdam(ADAMW, part.regions, part.device)),
        ],
        context.regions,
        context.device,
    )
