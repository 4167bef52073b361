"""Muon as a source: the options of its matrices."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.matrix_groups import MatrixKind, check_groups, device_update, host_update
from zeroshard.optim.muon.newton_schulz import COEFFICIENTS, check_method
from zeroshard.optim.muon.update import MatrixUpdate
from zeroshard.optim.sources import ParamGroups, Source

_ADJUSTMENTS = (None, "original", "match_rms_adamw")


def _check(group: Mapping[str, Any]) -> None:
    check_method(group)
    if not 0.0 <= group["momentum"] <= 1.0:
        raise PlanError(f"optimizer momentum {group['momentum']!r}: a number from 0 to 1 is needed")
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise PlanError(f"optimizer adjust_lr_fn {group['adjust_lr_fn']!r}: it is 'original' or 'match_rms_adamw'")


MUON = MatrixKind(
    mark="use_muon",
    field="matrices",
    defaults={
        "lr": 0.02,
        "momentum": 0.95,
        "weight_decay": 0.0,
        "nesterov": True,
        "ns_method": "standard",
        "ns_steps": 5,
        "ns_coefficients": COEFFICIENTS,
        "eps": 1e-7,
        "adjust_lr_fn": None,
    },
    check=_check,
    update=MatrixUpdate,
)


def muon_source(groups: ParamGroups, name: str, client: torch.optim.Optimizer | None = None) -> Source:
    """A source over groups that say by `use_muon` how they are updated. Raises PlanError as `check_groups`."""
    return Source(
        name,
        groups,
        {},
        2,
        lambda context: host_update(MUON, context, groups),
        on_device=(lambda context: device_update(MUON, context, groups)) if find_spec("triton") is not None else None,
        matrices=check_groups(MUON, groups),
        client=client,
    )
