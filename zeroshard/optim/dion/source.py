"""Dion as a source: the options of its matrices, and the ranks of their factors."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.dion.update import DionUpdate
from zeroshard.optim.matrix_groups import MatrixKind, check_groups, device_update, host_update
from zeroshard.optim.sources import ParamGroups, Source
from zeroshard.plan.factors import factor_rank
from zeroshard.sharding.unowned import whole_shape


def _check(group: Mapping[str, Any]) -> None:
    if not 0.0 <= group["mu"] <= 1.0:
        raise PlanError(f"optimizer mu {group['mu']!r}: a number from 0 to 1 is needed")
    if not 0.0 < group["rank_fraction"] <= 1.0:
        raise PlanError(f"optimizer rank_fraction {group['rank_fraction']!r}: a number above 0 and up to 1 is needed")


DION = MatrixKind(
    mark="use_dion",
    field="factor_ranks",
    defaults={"lr": 0.01, "mu": 0.95, "rank_fraction": 0.25, "weight_decay": 0.01},
    check=_check,
    update=DionUpdate,
)


def dion_source(groups: ParamGroups, client: torch.optim.Optimizer | None = None) -> Source:
    """A source over groups that say by `use_dion` how they are updated. Raises PlanError as `check_groups`."""
    check_groups(DION, groups)
    ranks = {
        id(parameter): factor_rank(whole_shape(parameter), group["rank_fraction"])
        for group in groups
        if group["use_dion"]
        for parameter in group["params"]
    }
    return Source(
        "Dion",
        groups,
        {},
        2,
        lambda context: host_update(DION, context, groups),
        on_device=(lambda context: device_update(DION, context, groups)) if find_spec("triton") is not None else None,
        factor_ranks=ranks,
        client=client,
    )
