"""A weight that the engine keeps in fp8: what its parameter is while its unit is in use.

    layer(input)             the layer takes the codes; autograd sees the parameter, which gets the gradient
    p.shape, p.dtype, ...    as it is in the model
    p * 2, f(p)              inside of a forward: on the values that the codes stand for, and the gradient reaches p
                             elsewhere, or in place: an error that names the parameter and what to do

Its memory is one NaN, stretched to the whole shape, as that of a parameter at rest is. Rejected: the codes as the
parameter's memory, in a dtype in which models would go on to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from zeroshard.errors import UsageError
from zeroshard.fp8.cast import decode
from zeroshard.sharding.resting import ALLOWED_CALLS, READABLE_ATTRIBUTES, HidesValues, name_of_call

_RECORD = "_zeroshard_codes"
_SHAPES = frozenset(
    {"shape", "size", "ndim", "dim", "ndimension", "stride", "__len__", "is_contiguous", "numel", "nelement", "nbytes"}
    | {"storage_offset", "share_memory_", "__hash__", "data_ptr", "untyped_storage", "as_strided", "view_as"}
)
"""Besides what resting parameters answer; torch.compile asks for the last ones."""
_HANDLES = frozenset({"data", "detach_"})
"""What hands the memory on to be written."""


@dataclass
class Codes:
    """The codes of a weight; the engine puts others here when its memory moves.

    Attributes:
        name: of the parameter, for messages.
        codes: of the weight's shape, whole whenever its unit is in use.
        unscale: of shape (1,).
        readable: whether the codes are whole now, so that something other than the layer may read the values.
    """

    name: str
    codes: torch.Tensor
    unscale: torch.Tensor
    readable: Callable[[], bool]


class CodedGuard(HidesValues):
    """What the class of such a parameter has before its own."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Raises UsageError for what would read values that are not here, or write any."""
        name, sets = name_of_call(func)
        given = dict(kwargs or {})
        if name in ALLOWED_CALLS or name in READABLE_ATTRIBUTES or (name in _SHAPES and not sets):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        if name == "__repr__":
            return _described(args[0])
        first = args[0] if args else None
        writes = sets or name in _HANDLES or (name.endswith("_") and not name.endswith("__"))
        if writes and isinstance(first, CodedGuard):
            raise _refusal(first, name)
        return func(*_read(args, name), **_read(given, name))


class _Values(torch.autograd.Function):
    """The values that the codes of a parameter stand for; their gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, codes: torch.Tensor, unscale: torch.Tensor) -> torch.Tensor:
        return decode(codes, unscale, parameter.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, None


def _read(value: Any, name: str) -> Any:
    """The arguments of a call with values in the place of such parameters."""
    if isinstance(value, CodedGuard):
        record = record_of(cast("torch.Tensor", value))
        if not record.readable():
            raise _refusal(value, name)
        return _Values.apply(value, record.codes, record.unscale)
    if type(value) in (tuple, list):
        return type(value)(_read(item, name) for item in value)
    if type(value) is dict:
        return {key: _read(item, name) for key, item in value.items()}
    return value


def record_of(parameter: torch.Tensor) -> Codes:
    """The codes of a parameter to which `keep_codes` gave some."""
    found: Codes = vars(parameter)[_RECORD]
    return found


def kept_codes(parameter: torch.Tensor) -> Codes | None:
    """The codes of a parameter, whatever it shows now; None if it has none."""
    return vars(parameter).get(_RECORD)


def keep_codes(parameter: torch.Tensor, record: Codes) -> None:
    """From now on the parameter's class may be its `coded_class`."""
    vars(parameter)[_RECORD] = record


def drop_codes(parameter: torch.Tensor) -> None:
    """The parameter is one that shows its values again."""
    vars(parameter).pop(_RECORD, None)


@cache
def coded_class(whole: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class of a parameter of class `whole` while only the codes of its values are there; a subclass of it."""
    assert not issubclass(whole, HidesValues)
    name = "CodedParameter" if whole is nn.Parameter else whole.__name__
    return cast("type[torch.Tensor]", type(name, (CodedGuard, whole), {"__module__": __name__, "whole_class": whole}))


def _described(parameter: Any) -> str:
    record = record_of(parameter)
    return f"parameter {record.name!r} of shape {tuple(record.codes.shape)}, in fp8"


def _refusal(parameter: Any, name: str) -> UsageError:
    return UsageError(
        f"torch's {name.strip('_')}: parameter {record_of(parameter).name!r} rests in fp8, for the products of its "
        "layer, and its values are not here. Read it in a forward of the model, on all ranks inside "
        "zeroshard.GatheredParameters([parameter]), or with zeroshard.safe_get_full_fp32_param(parameter); to change "
        "it, use zeroshard.GatheredParameters([parameter], modifier_rank=0). To keep it in full, leave its layer out "
        "of fp8.filter"
    )
