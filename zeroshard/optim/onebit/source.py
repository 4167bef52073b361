"""1-bit optimizers as sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.onebit import base, lamb
from zeroshard.optim.onebit.base import OneBitUpdate
from zeroshard.optim.onebit.lamb import OneBitLambUpdate
from zeroshard.optim.onebit.zero_one import Policy, ZeroOneAdamUpdate
from zeroshard.optim.rules import check_betas, check_common
from zeroshard.optim.sources import ParamGroups, Source, fill_group
from zeroshard.optim.update_context import UpdateContext

FREEZE_STEP = 100_000


@dataclass(frozen=True)
class _Kind:
    defaults: Mapping[str, Any]
    make: Callable[[UpdateContext, int], OneBitUpdate]
    sums: int = 0
    maxima: int = 0
    fresh: int = 0


_KINDS = {
    "OneBitAdam": _Kind(base.DEFAULTS, OneBitUpdate),
    "OneBitLamb": _Kind(lamb.DEFAULTS, OneBitLambUpdate, sums=2, maxima=1, fresh=1),
}


def onebit_source(
    name: str,
    groups: ParamGroups,
    defaults: Mapping[str, Any],
    freeze_step: int,
    client: torch.optim.Optimizer | None = None,
) -> Source:
    """A source over `groups`.

    Args:
        name: OneBitAdam or OneBitLamb.
        freeze_step: steps of the warm-up, with averaged gradients.

    Raises:
        PlanError: a hyper-parameter is out of range.
    """
    kind = _KINDS[name]
    _check_groups(groups, {**kind.defaults, **defaults})
    if freeze_step < 1:
        raise PlanError(f"{name} freeze_step {freeze_step}: at least one step of warm-up is needed for a second moment")

    def make(context: UpdateContext) -> OneBitUpdate:
        return kind.make(context, freeze_step)

    return Source(
        name,
        groups,
        {**kind.defaults, **defaults},
        1 + kind.fresh,
        make,
        parameter_sums=kind.sums,
        parameter_maxima=kind.maxima,
        compressed=make,
        client=client,
    )


def zero_one_source(
    groups: ParamGroups, defaults: Mapping[str, Any], policy: Policy, client: torch.optim.Optimizer | None = None
) -> Source:
    """A source of 0/1 Adam over `groups`. Raises PlanError for hyper-parameters out of range."""
    _check_groups(groups, {**base.DEFAULTS, **defaults})

    def make(context: UpdateContext) -> OneBitUpdate:
        return ZeroOneAdamUpdate(context, policy)

    moments = 3 if policy.local_step_clipper > 1 else 1
    return Source("ZeroOneAdam", groups, {**base.DEFAULTS, **defaults}, moments, make, compressed=make, client=client)


def _check_groups(groups: ParamGroups, defaults: Mapping[str, Any]) -> None:
    for group in groups:
        fill_group(group, defaults)
        check_common(group)
        check_betas(group)
        if not group["eps"] >= 0.0:
            raise PlanError(f"optimizer eps {group['eps']!r} must not be negative")
