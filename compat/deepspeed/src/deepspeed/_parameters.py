"""The `ds_*` attributes of sharded parameters, which libraries read to see that a parameter is elsewhere.

They are put on the parameter object itself, which stays the same for its whole life. A subclass of nn.Parameter was
rejected: copies of a parameter would be of it too, and torch's fast paths are for the plain class.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.engine.memory.rank_values import rank_param, rank_part
from zeroshard.engine.outside_step.gathered import GatheredParameters, place_of
from zeroshard.sharding.unowned import unowned_shard_of

_IDS = itertools.count()


class ZeroParamStatus(Enum):
    """Where a parameter is."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _Status:
    """What `parameter.ds_status` is: equal to the status that the parameter has when it is compared."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._of = weakref.ref(parameter)

    def now(self) -> ZeroParamStatus:
        parameter = self._of()
        whole = parameter is not None and (parameter.numel() > 0 or parameter.__dict__["ds_numel"] == 0)
        return ZeroParamStatus.AVAILABLE if whole else ZeroParamStatus.NOT_AVAILABLE

    def __eq__(self, other: object) -> bool:
        return self.now() is (other.now() if isinstance(other, _Status) else other)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return repr(self.now())


_CHECKED = "_zeroshard_sanity_checks"
"""On a parameter whose config enables sanity checks."""


def enables_checks(config: Mapping[str, Any]) -> bool:
    """Whether a config says `zero_optimization.enable_sanity_checks`."""
    zero = config.get("zero_optimization")
    return isinstance(zero, Mapping) and zero.get("enable_sanity_checks") in (True, 1)


def is_checked(parameter: torch.Tensor) -> bool:
    """Whether a change of the parameter that would be lost is an error."""
    return _CHECKED in vars(parameter)


def describe(parameters: Iterable[nn.Parameter], *, resident: bool = False, checked: bool = False) -> None:
    """Put the attributes on parameters that are sharded, without an owner or by an engine; others are left as they are.

    Args:
        resident: and on those of an engine that stay whole.
        checked: their config enables sanity checks.
    """
    for parameter in parameters:
        found = _sharded(parameter, resident)
        if found is None:
            continue
        shape, ranks, persists = found
        numel = shape.numel()
        attributes = vars(parameter)
        attributes.pop(_CHECKED, None)
        if checked:
            attributes[_CHECKED] = True
        attributes.setdefault("ds_id", next(_IDS))
        attributes.update(
            ds_shape=shape,
            ds_numel=numel,
            ds_status=_Status(parameter),
            ds_active_sub_modules=set(),
            ds_process_group=dist.group.WORLD if dist.is_initialized() else None,
            ds_tensor=_part(parameter),
            ds_persist=persists,
            partition_numel=lambda share=-(-numel // ranks): share,
            item=_item_of(parameter),
        )


def announce(parameters: Iterable[nn.Parameter]) -> None:
    """Put the attributes on parameters that will be sharded at the end of the Init around them, and are whole yet."""
    for parameter in parameters:
        attributes = vars(parameter)
        attributes.setdefault("ds_id", next(_IDS))
        attributes.update(ds_shape=parameter.shape, ds_numel=parameter.numel(), ds_status=_Status(parameter))


def _sharded(parameter: torch.Tensor, resident: bool) -> tuple[torch.Size, int, bool] | None:
    """Shape and number of shards of a parameter that is sharded, and whether it stays whole all the same."""
    unowned, place = unowned_shard_of(parameter), place_of(parameter)
    if unowned is not None:
        return torch.Size(unowned.shape), unowned.ranks, False
    if place is None or not (resident or place[2].plan.param.divided):
        return None
    plan = place[2].plan
    return torch.Size(plan.layout.segments[place[3]].shape), plan.layout.shards, not plan.param.divided


def _part(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank keeps of a sharded parameter, flat: the memory itself, in the dtype in which it rests."""
    unowned, place = unowned_shard_of(parameter), place_of(parameter)
    if unowned is not None:
        return unowned.values
    assert place is not None
    _, _, group, index = place
    segment = group.plan.layout.segments[index]
    if not group.plan.param.divided:
        return group.whole[segment.offset : segment.end]
    return rank_param(group)[rank_part(group, index)[0]]


def _item_of(parameter: torch.Tensor) -> Any:
    reference = weakref.ref(parameter)

    def item() -> float:
        """The value of a parameter with one element; called by all ranks."""
        member = reference()
        assert member is not None
        with GatheredParameters([member]):
            return torch.Tensor.item(member)

    return item
