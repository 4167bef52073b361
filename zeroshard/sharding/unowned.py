"""Sharded parameters that no engine owns: between an `Init` that shards and `initialize`, and between `close` and the
next `initialize`.

    element   0 ......... b1 ......... b2 ......... numel      of the flat parameter
              [  rank 0  ) [  rank 1  ) [  rank 2  )           `parts`, known on all ranks; in any order

The parameter is the same object and rests. Each rank's shard is an attribute of the parameter. Rejected: to build the
whole model on every rank and shard it later, which needs the memory of the whole model on each rank.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.errors import UsageError
from zeroshard.sharding.dtensors import holder_of
from zeroshard.sharding.resting import Resting, expanded_nan, is_resting, recorded_name, rest

_UNOWNED = "_zeroshard_unowned"
_WHY = (
    "this rank holds only a part of it, and no engine has it: the model was built under an Init that shards, or its "
    "engine was closed (engine.destroy(), zeroshard.close())"
)
_REMEDY = (
    "call zeroshard.initialize() or shard() first, or read it on all ranks inside "
    "zeroshard.GatheredParameters([parameter])"
)
_COPY_ATTRIBUTE = "__deepcopy__"
"""copy.deepcopy looks for this attribute at the object itself before its class."""


@dataclass
class UnownedShard:
    """This rank's shard of a parameter.

    Attributes:
        shape: that of the whole parameter.
        parts: of each rank the elements [start, end) of the flat parameter.
        values: this rank's elements, flat; master weights of a closed engine in float32, whatever the parameter's
            dtype, and in host memory if they rested there.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    values: torch.Tensor

    @property
    def ranks(self) -> int:
        return len(self.parts)

    def write(self, whole: torch.Tensor) -> None:
        """Copy this rank's part of a whole parameter."""
        rank = dist.get_rank() if self.ranks > 1 else 0
        new = whole.detach().to(self.values.device).reshape(-1)[slice(*self.parts[rank])]
        # Unchanged elements keep their values, which may have more precision than the parameter's dtype.
        self.values.copy_(torch.where(self.values.to(new.dtype) == new, self.values, new.to(self.values.dtype)))


def even_parts(numel: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """The elements [start, end) of each rank of the default group, in even parts, and those of this rank."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_available() and dist.is_initialized() else (1, 0)
    share = -(-numel // ranks)
    parts = [(min(share * number, numel), min(share * (number + 1), numel)) for number in range(ranks)]
    return parts, parts[rank]


def shard_unowned(parameter: torch.Tensor, value: torch.Tensor, name: str = "", *, on_host: bool = False) -> None:
    """Attach this rank's even part of `value` to `parameter`, which then rests. Does not communicate.

    Args:
        value: the whole parameter, equal on all ranks.
        on_host: keep the part in host memory, wherever `value` is.
    """
    parts, (start, end) = even_parts(value.numel())
    own = value.detach().reshape(-1)[start:end].to("cpu" if on_host else value.device, copy=True)
    keep_shard(parameter, tuple(value.shape), parts, own)
    rest_unowned(parameter, name)


def keep_shard(
    parameter: torch.Tensor, shape: Sequence[int], parts: Sequence[tuple[int, int]], values: torch.Tensor
) -> None:
    """Attach this rank's part to `parameter`; call `rest_unowned` next."""
    vars(parameter)[_UNOWNED] = UnownedShard(tuple(shape), tuple(parts), values)
    vars(parameter)[_COPY_ATTRIBUTE] = _Copier(parameter)


def rest_unowned(parameter: torch.Tensor, name: str = "") -> None:
    """Let an unowned parameter rest; its shard must be attached already."""
    unowned = unowned_shard_of(parameter)
    assert unowned is not None
    record = Resting(name or recorded_name(parameter), None, _WHY, _REMEDY)
    rest(parameter, record, expanded_nan(unowned.shape, parameter.dtype, parameter.device))


class _Copier:
    """What copy.deepcopy calls for an unowned parameter; torch's own method would not copy the shard."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)

    def __call__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A parameter with a copy of the shard; for a parameter that is whole at present, an ordinary copy."""
        parameter = self._parameter()
        assert parameter is not None
        unowned = unowned_shard_of(parameter)
        if unowned is None or not is_resting(parameter):
            return type(parameter).__deepcopy__(parameter, memo)
        nothing = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        copied = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
        keep_shard(copied, unowned.shape, unowned.parts, unowned.values.clone())
        rest_unowned(copied)
        memo[id(parameter)] = copied
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Pickle comes here. Raises UsageError."""
        raise UsageError(
            "a parameter that is sharded can't be pickled (torch.save(model)): its values are on all ranks. Save it "
            "inside zeroshard.GatheredParameters, or save the model's state after shard() or initialize()"
        )


def unowned_shard_of(parameter: torch.Tensor) -> UnownedShard | None:
    """The parameter's unowned shard; None for a parameter that is whole or that an engine owns."""
    found: UnownedShard | None = vars(parameter).get(_UNOWNED)
    return found


def forget_unowned(parameter: torch.Tensor) -> None:
    """Drop the unowned shard."""
    vars(parameter).pop(_UNOWNED, None)
    vars(parameter).pop(_COPY_ATTRIBUTE, None)


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The whole parameter's shape, sharded or not; if the model divides it, the shape of this rank's part."""
    unowned = unowned_shard_of(parameter)
    return tuple(holder_of(parameter).shape) if unowned is None else unowned.shape


def whole_numel(parameter: torch.Tensor) -> int:
    """The number of elements of the whole parameter, as in `whole_shape`."""
    return math.prod(whole_shape(parameter))
