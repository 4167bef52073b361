"""The `ds_*` attributes of sharded parameters, which libraries read to see that a parameter is elsewhere.

They are put on the parameter object itself, which stays the same for its whole life. A subclass of nn.Parameter was
rejected: copies of a parameter would be of it too, and torch's fast paths are for the plain class.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.engine.memory.rank_values import rank_param, rank_part
from zeroshard.engine.outside_step.access import safe_set_full_fp32_param, safe_set_local_fp32_param
from zeroshard.engine.outside_step.gathered import GatheredParameters, place_of
from zeroshard.errors import UsageError
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

    def __hash__(self) -> int:
        """As equality says, so that `parameter.ds_status in {...}` finds the status of now."""
        return hash(self.now())

    def __repr__(self) -> str:
        return repr(self.now())


class _Part(torch.Tensor):
    """What `parameter.ds_tensor` is: the memory that this rank keeps. Other data that it is given is written on it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @property
    def data(self) -> torch.Tensor:
        """The memory, as a plain tensor."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Called by all ranks, between steps; master weights follow. Raises UsageError for another size."""
        parameter = vars(self)["parameter"]()
        if parameter is None or value.numel() != self.numel():
            raise UsageError(f"ds_tensor holds {self.numel()} elements of the parameter, not {value.numel()}")
        if unowned_shard_of(parameter) is not None:
            with torch.no_grad():
                self.copy_(value.view(self.shape))
        elif vars(parameter)["ds_persist"]:  # it rests whole
            safe_set_full_fp32_param(parameter, value.reshape(parameter.shape))
        else:
            safe_set_local_fp32_param(parameter, value)


_CHECKED = "_zeroshard_sanity_checks"
"""On a parameter whose config enables sanity checks."""


def enables_checks(config: Mapping[str, Any]) -> bool:
    """Whether a config says `zero_optimization.enable_sanity_checks`."""
    zero = config.get("zero_optimization")
    return isinstance(zero, Mapping) and zero.get("enable_sanity_checks") in (True, 1)


def is_described(parameter: torch.Tensor) -> bool:
    """Whether it is one of stage 3, or of an Init that shards: DeepSpeed's blocks do something with it."""
    return "ds_id" in vars(parameter)


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
            ds_tensor=_kept(parameter),
            ds_summary=_summary_of(parameter),
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


def _kept(parameter: torch.Tensor) -> torch.Tensor:
    kept = _part(parameter).detach().as_subclass(_Part)
    vars(kept)["parameter"] = weakref.ref(parameter)
    return kept


def _summary_of(parameter: torch.Tensor) -> Callable[[], dict[str, Any]]:
    reference = weakref.ref(parameter)

    def summary() -> dict[str, Any]:
        """What is known of the parameter, for messages."""
        member = reference()
        assert member is not None
        attributes = vars(member)
        shape, status = tuple(attributes["ds_shape"]), attributes["ds_status"].now()
        kept = attributes["ds_tensor"].numel()
        return {"id": attributes["ds_id"], "status": status.name, "shape": shape, "elements_on_this_rank": kept}

    return summary


def _item_of(parameter: torch.Tensor) -> Any:
    reference = weakref.ref(parameter)

    def item() -> float:
        """The value of a parameter with one element; called by all ranks."""
        member = reference()
        assert member is not None
        with GatheredParameters([member]):
            return torch.Tensor.item(member)

    return item
