"""The parameter of a weight that the engine keeps in fp8, while its unit is in use.

    layer(input)             the layer reads the codes; autograd gives the gradient to the parameter
    p.shape, p.dtype, ...    those of the model
    p * 2, f(p)              inside of a forward: computed with the decoded values, and the gradient reaches p;
                             elsewhere, or in place: an error that names the parameter and says what to do
    p.detach()               elsewhere: without values too, and guarded like p (state_dict() takes it)

The parameter's memory is one NaN, expanded to the whole shape, like that of a resting parameter. Rejected: the codes as
the parameter's memory; models would compute in their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from zeroshard.errors import UsageError
from zeroshard.fp8.cast import decode
from zeroshard.sharding.resting import ALLOWED_CALLS, READABLE_ATTRIBUTES, HidesValues, changes_first, name_of_call

_RECORD = "_zeroshard_codes"
_SHAPES = frozenset(
    {"shape", "size", "ndim", "dim", "ndimension", "stride", "__len__", "is_contiguous", "numel", "nelement", "nbytes"}
    | {"storage_offset", "share_memory_", "__hash__", "data_ptr", "untyped_storage", "as_strided", "view_as"}
)
"""Names that are answered besides those of resting parameters; torch.compile needs the last ones."""
_HANDLES = frozenset({"data", "detach_"})
"""Names that give access to the memory for writes."""


@dataclass
class Codes:
    """The codes of a weight; the engine replaces them when its memory moves.

    Attributes:
        name: name of the parameter, for messages.
        codes: of the weight's shape; they are whole while the unit is in use.
        unscale: of shape (1,), or one for each block of 128 x 128 weights.
        readable: whether the codes are whole now, so that code other than the layer may read the values.
    """

    name: str
    codes: torch.Tensor
    unscale: torch.Tensor
    readable: Callable[[], bool]


class CodedGuard(HidesValues):
    """The first base class of such a parameter's class; it handles all calls of torch with the parameter."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a call of torch. Raises UsageError for reads of values that are not whole, and for writes."""
        name, sets = name_of_call(func)
        given = dict(kwargs or {})
        if name in ALLOWED_CALLS or name in READABLE_ATTRIBUTES or (name in _SHAPES and not sets):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        if name == "__repr__":
            return _described(args[0])
        first = args[0] if args else None
        if name == "detach" and isinstance(first, CodedGuard) and not record_of(cast("torch.Tensor", first)).readable():
            return _guarded(cast("torch.Tensor", first))
        writes = sets or name in _HANDLES or changes_first(name)
        if writes and isinstance(first, CodedGuard):
            raise _refusal(first, name)
        return func(*_read(args, name), **_read(given, name))


class _Values(torch.autograd.Function):
    """Decodes the values of a parameter; their gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, codes: torch.Tensor, unscale: torch.Tensor) -> torch.Tensor:
        return decode(codes, unscale, parameter.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, None


def _read(value: Any, name: str) -> Any:
    """The arguments of a call with such parameters replaced by their values."""
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


def _guarded(parameter: torch.Tensor) -> torch.Tensor:
    """What `detach()` returns where values may not be read."""
    with torch._C.DisableTorchFunctionSubclass():
        value = parameter.detach().as_subclass(type(parameter))
    keep_codes(value, replace(record_of(parameter), readable=lambda: False))
    return value


def record_of(parameter: torch.Tensor) -> Codes:
    """The codes of a parameter that has some."""
    found: Codes = vars(parameter)[_RECORD]
    return found


def kept_codes(parameter: torch.Tensor) -> Codes | None:
    """The codes of a parameter; None if it has none."""
    return vars(parameter).get(_RECORD)


def keep_codes(parameter: torch.Tensor, record: Codes) -> None:
    """Attach codes to a parameter, so that its class may become its `coded_class`."""
    vars(parameter)[_RECORD] = record


def drop_codes(parameter: torch.Tensor) -> None:
    """Detach the codes of a parameter that has its values again."""
    vars(parameter).pop(_RECORD, None)


@cache
def coded_class(whole: type[torch.Tensor]) -> type[torch.Tensor]:
    """The subclass of `whole` that a parameter has while only its codes are in memory."""
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
