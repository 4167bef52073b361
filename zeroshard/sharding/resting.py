"""Resting parameters: their values are on other ranks or in host memory, and every read of them is noticed.

    p = model.head.weight        # sharded, at rest
    p.shape, p.dtype, p.grad     as of the whole parameter (numel() is 0, by which libraries see that it is sharded)
    p.norm(), p * 2, f(p)        inside of a forward: its unit is gathered first, and the operation runs on the values
                                 elsewhere: an error that names the parameter and what to do

A resting parameter is the same object with another class, whose `__torch_function__` is called for every operation. In
use it has its own class again, so the operations of a forward have no overhead. Its memory is one NaN expanded to the
whole shape. So what autograd makes of it has the right shape even if the first operation is a custom
`autograd.Function`, and code that bypasses `__torch_function__` computes NaN, not a wrong number. Rejected: an ordinary
tensor without elements, whose sums and norms are 0 without an error.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from zeroshard.errors import UsageError
from zeroshard.sharding.dtensors import holder_of

_RECORD = "_zeroshard_resting"

_P = TypeVar("_P", bound=torch.Tensor)
Fetch = Callable[[], None]
"""Makes a resting parameter whole for the operation that is about to read it, or returns without doing so."""


@dataclass
class Resting:
    """What is recorded of a parameter that rests.

    Attributes:
        name: the parameter's name, for messages.
        fetch: called before an operation that reads the values. The operation is refused if this is None, or if the
            parameter still rests afterwards.
        why: why the values are elsewhere, as a sentence for the message.
        remedy: what to do, for the message.
    """

    name: str
    fetch: Fetch | None = None
    why: str = "it is sharded, and this rank holds only a part of it"
    remedy: str = (
        "read it inside a forward of the model, or on all ranks inside zeroshard.GatheredParameters([parameter]); "
        "zeroshard.safe_get_full_fp32_param(parameter) gives a copy, and at stages 0 to 2 parameters are whole"
    )


class RestingShape(tuple[int, ...]):
    """The whole shape of a resting parameter. It equals (0,) too, by which libraries see that it is sharded."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True or other == (0,)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def numel(self) -> int:
        """As `numel()` of the parameter: 0."""
        return 0


READABLE_ATTRIBUTES = frozenset(
    {"dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "grad", "_grad", "_version", "_base"}
    | {"_backward_hooks", "_post_accumulate_grad_hooks", "output_nr", "retains_grad", "name", "names", "itemsize"}
    | {"is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_mkldnn", "is_quantized", "is_nested"}
    | {"is_xla", "is_xpu", "is_mps", "is_hpu", "is_vulkan", "is_ipu", "is_maia", "is_mtia", "volatile", "grad_dtype"}
)
"""Attributes that are the same at rest; they may also be set."""
ALLOWED_CALLS = frozenset(
    {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "is_floating_point"}
    | {"is_complex", "is_signed", "is_inference", "is_conj", "is_neg", "is_pinned", "is_shared", "is_coalesced"}
    | {"is_distributed", "element_size", "get_device", "has_names", "_is_view", "_is_zerotensor", "is_tensor"}
    | {"_has_compatible_shallow_copy_type", "_has_symbolic_sizes_strides", "_is_all_true"}
)
"""Functions that read no values."""
_CONVERSIONS = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "type_as"})
"""Functions that return the parameter itself where there is nothing to convert."""


def _shape(tensor: torch.Tensor) -> RestingShape:
    return RestingShape(_plain(torch.Tensor.size, tensor))


def _size(tensor: torch.Tensor, dim: int | None = None) -> int | RestingShape:
    return _shape(tensor) if dim is None else _shape(tensor)[dim]


def _stride(tensor: torch.Tensor, dim: int | None = None) -> int | tuple[int, ...]:
    shape = tuple(_shape(tensor))
    strides = tuple(math.prod(max(1, size) for size in shape[place + 1 :]) for place in range(len(shape)))
    return strides if dim is None else strides[dim]


_STATIC_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "shape": _shape,
    "size": _size,
    "ndim": lambda tensor: len(_shape(tensor)),
    "dim": lambda tensor: len(_shape(tensor)),
    "ndimension": lambda tensor: len(_shape(tensor)),
    "stride": _stride,
    "__len__": lambda tensor: _shape(tensor)[0],
    "is_contiguous": lambda tensor, *_, **__: True,
    "numel": lambda tensor: 0,
    "nelement": lambda tensor: 0,
    "nbytes": lambda tensor: 0,
    "storage_offset": lambda tensor: 0,
    "share_memory_": lambda tensor: tensor,
    "__repr__": lambda tensor, **_: f"{_named(tensor)} of shape {tuple(_shape(tensor))}, {tensor.dtype}, at rest",
}
"""Attributes and methods that are answered without reading values."""
_NO_MEMORY: Mapping[str, Callable[..., Any]] = {
    "data_ptr": lambda tensor: 0,
    "untyped_storage": lambda tensor: torch.UntypedStorage(0, device=tensor.device),
}
"""Answers about the memory for parameters that can't be gathered: there is none."""
_PRECEDING_CALLS: Mapping[tuple[object, str], str] = {
    ("torch.nn.init", "numel"): "orthogonal_",
    ("torch._functorch.vmap", "dim"): "vmap",
    ("torch._functorch.eager_transforms", "numel"): "jacfwd",
}
"""Functions of torch that bypass the guard after a first call: by module and name of that call, the function's name.
`orthogonal_` does nothing without elements, `vmap` wraps the memory, `jacfwd` makes a derivative for each element. That
first call is refused like a read."""
_NUMEL_READERS = frozenset(
    {("transformers.modeling_utils", "num_parameters"), ("transformers.trainer_pt_utils", "numel")}
)
"""Functions that only add up `numel()`: they get the number of elements of the whole parameter."""
_SELF_VIEWS = frozenset({"view_as", "expand_as"})
"""`p.view_as(p).grad_fn.next_functions[0][0]` is a common way to find the node that accumulates p's gradients."""
_COPY_METHODS = frozenset({"__reduce_ex__", "__deepcopy__", "__reduce__"})
_ALIASES = frozenset({"detach", "detach_", "data"})
"""What returns the same memory without reading it; outside of a forward the result is guarded like the parameter."""


def _plain(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def name_of_call(func: Callable[..., Any]) -> tuple[str, bool]:
    """Name of a function of torch, or of the attribute that it gets or sets; and whether it sets one."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name)), name != "__get__"
    return name.split(".")[0], False


_OPERATORS = frozenset(
    {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift", "div"}
)
"""Python's operators that have a form in place, as `__iadd__`."""


def changes_first(name: str) -> bool:
    """Whether a function of torch, by its name as of `name_of_call`, changes its first argument and returns it."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or (name.startswith("__i") and name.endswith("__") and name[3:-2] in _OPERATORS)


class HidesValues:
    """Base of the classes that replace a parameter's own class while it shows no values."""

    whole_class: type[Any]
    """The parameter's own class."""


class Guard(HidesValues):
    """First base of a resting parameter's class: every operation calls its `__torch_function__`."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Raises UsageError for what would read the values, unless they can be fetched here."""
        return _answer(func, args, dict(kwargs or {}))

    # torch answers these without asking __torch_function__.

    def as_subclass(self, cls: type[Any]) -> NoReturn:
        """Raises UsageError."""
        raise _refusal(cast("torch.Tensor", self), "as_subclass")

    def __complex__(self) -> NoReturn:
        raise _refusal(cast("torch.Tensor", self), "complex")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        # torch's own method takes the class of the copy before it reads the values: that would be the guard.
        tensor = _fetched(cast("torch.Tensor", self), "__deepcopy__")
        copied: torch.Tensor = type(tensor).__deepcopy__(tensor, memo)
        return copied

    def __dlpack__(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal(cast("torch.Tensor", self), "dlpack")


class PartGuard(Guard):
    """Guard of a DTensor, whose own methods are written in Python and don't call `__torch_function__`."""

    def to_local(self, **options: Any) -> torch.Tensor:
        """As the whole parameter's, and so are the others; if the values can't be fetched they raise UsageError."""
        return _fetched(cast("torch.Tensor", self), "to_local").to_local(**options)

    def full_tensor(self, **options: Any) -> torch.Tensor:
        return _fetched(cast("torch.Tensor", self), "full_tensor").full_tensor(**options)

    def redistribute(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return _fetched(cast("torch.Tensor", self), "redistribute").redistribute(*arguments, **options)


class GuardedValue(Guard, torch.Tensor):
    """What `detach()` and `.data` of a resting parameter return: without values, and guarded like the parameter."""


def _answer(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name, sets = name_of_call(func)
    if name in ALLOWED_CALLS or name in READABLE_ATTRIBUTES:
        return _plain(func, *args, **kwargs)
    if name == "_make_dual":
        raise _dual_refusal(args)
    first = args[0] if args else None
    if name == "backward" and kwargs.get("inputs") is not None and not isinstance(first, Guard):
        return func(*args, **{**kwargs, "inputs": _gradient_edges(kwargs["inputs"])})
    if name in _SELF_VIEWS and len(args) > 1 and args[1] is first:
        _fetch_all(args)
        return _view_of_itself(func, first) if isinstance(first, Guard) else func(*args)
    if sets and name == "data" and len(args) > 1 and args[1] is first:
        return None  # module.to(device) does this when there is nothing to move
    alone = isinstance(first, Guard) and not sets
    if alone and name in _STATIC_ANSWERS:
        frame = sys._getframe(2)  # past __torch_function__
        asked_by = frame.f_globals.get("__name__")
        if name == "numel" and (asked_by, frame.f_code.co_name) in _NUMEL_READERS:
            return math.prod(_shape(cast("torch.Tensor", first)))
        reader = _PRECEDING_CALLS.get((asked_by, name))
        if reader is None:
            arguments = () if name in _AS_ATTRIBUTES and getattr(func, "__name__", "") == "__get__" else args[1:]
            return _STATIC_ANSWERS[name](first, *arguments, **kwargs)
        name = reader
    if alone and name in _CONVERSIONS:
        converted = _plain(func, *args, **kwargs)
        if converted is first:
            return first
    _fetch_all((args, kwargs))
    still = next(_resting_in((args, kwargs)), None)
    if still is None:
        answer = func(*args, **kwargs)
        # nn.Parameter(parameter) needs a `detach` that returns the class of its argument.
        asks = name == "detach" and sys._getframe(2).f_globals.get("__name__") == "torch.nn.parameter"
        return torch.Tensor._make_subclass(cast("type[torch.Tensor]", type(first)), answer) if asks else answer
    if alone and name in _NO_MEMORY:
        return _NO_MEMORY[name](first)
    if alone and name in _ALIASES:
        return _guarded(still, type(still) if name == "detach" else GuardedValue)
    raise _refusal(still, name)


def _gradient_edges(inputs: Any) -> list[Any]:
    """The `inputs` of a backward, with resting parameters replaced by their gradient edges."""
    several = (
        inputs.values() if isinstance(inputs, Mapping) else (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    )
    edge_of = torch.autograd.graph.get_gradient_edge
    return [edge_of(cast("torch.Tensor", one)) if isinstance(one, Guard) else one for one in several]


def _view_of_itself(func: Callable[..., Any], parameter: Guard) -> torch.Tensor:
    """A guarded view whose `grad_fn` leads to the parameter."""
    assert isinstance(parameter, torch.Tensor)
    view: torch.Tensor = _plain(func, parameter, parameter)
    view.__class__ = GuardedValue
    vars(view)[_RECORD] = replace(_record(parameter), fetch=None)
    return view


def _dual_refusal(arguments: Sequence[Any]) -> UsageError:
    """The refusal of forward-mode derivatives: they keep the memory that they get, which a gather would replace."""
    return UsageError(
        f"forward derivatives (torch.func.jvp, make_dual) of {_named(next(_resting_in(arguments)))} while it rests: "
        "read it before, and pass what was read (weight.clone())"
    )


_AS_ATTRIBUTES = frozenset({"shape", "ndim", "nbytes"})


def _resting_in(value: object) -> Iterator[torch.Tensor]:
    """The resting parameters among the arguments of an operation."""
    if isinstance(value, Guard):
        assert isinstance(value, torch.Tensor)
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _resting_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _resting_in(item)


def _fetch_all(arguments: object) -> None:
    for tensor in list(_resting_in(arguments)):
        record = _record(tensor)
        if isinstance(tensor, Guard) and record.fetch is not None:
            record.fetch()


def _fetched(tensor: torch.Tensor, name: str) -> Any:
    """The parameter with its values."""
    _fetch_all((tensor,))
    if isinstance(tensor, Guard):
        raise _refusal(tensor, name)
    return tensor


def _guarded(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    value = _plain(torch.Tensor.detach, tensor)
    if isinstance(tensor, PartGuard):
        value.__class__ = type(tensor)
    else:
        value = torch.Tensor.as_subclass(value, kind)
    # It can't be fetched: a gather of the parameter does not give this tensor values.
    vars(value)[_RECORD] = replace(_record(tensor), fetch=None)
    return value


def _refusal(tensor: torch.Tensor, name: str) -> UsageError:
    record = _record(tensor)
    if name in _COPY_METHODS:
        return UsageError(
            f"{_named(tensor)} can't be pickled or copied (torch.save(model), copy.deepcopy): its values are not here: "
            f"{record.why}. Use zeroshard.full_state_dict(model), or do it inside zeroshard.GatheredParameters"
        )
    return UsageError(
        f"torch's {name.strip('_')}: the values of {_named(tensor)} are not here: {record.why}. To compute with them, "
        f"{record.remedy}. To change or replace them, use zeroshard.GatheredParameters([parameter], modifier_rank=0)"
    )


def recorded_name(tensor: torch.Tensor) -> str:
    """The name that was recorded when the parameter last came to rest; "" if there is none."""
    record: Resting | None = vars(tensor).get(_RECORD)
    return "" if record is None else record.name


def name_resting(tensor: torch.Tensor, name: str) -> None:
    """Name a parameter that rests, for messages."""
    _record(tensor).name = name


def _named(tensor: torch.Tensor) -> str:
    name = recorded_name(tensor)
    return f"parameter {name!r}" if name else "a parameter"


def _record(tensor: torch.Tensor) -> Resting:
    found: Resting = vars(tensor)[_RECORD]
    return found


@cache
def resting_class(whole: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class of a parameter of class `whole` while it rests; a subclass of it."""
    assert not issubclass(whole, HidesValues)
    guard = PartGuard if is_traceable_wrapper_subclass_type(whole) else Guard
    members = {"__module__": __name__, "whole_class": whole}
    # Libraries of quantized weights recognize their parameters by the name of the class.
    name = "RestingParameter" if whole is nn.Parameter else whole.__name__
    return cast("type[torch.Tensor]", type(name, (guard, whole), members))


def whole_class(parameter: _P) -> type[_P]:
    """The parameter's own class, whether it rests or not."""
    kind = type(parameter)
    return cast("type[_P]", kind.whole_class) if issubclass(kind, HidesValues) else kind


def is_resting(tensor: torch.Tensor) -> bool:
    """Whether the parameter's values are elsewhere."""
    return isinstance(tensor, Guard)


def unguarded() -> AbstractContextManager[Any]:
    """Inside, resting parameters behave like plain tensors over their memory; also makes attribute access cheaper."""
    return torch._C.DisableTorchFunctionSubclass()


def expanded_nan(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of a shape over the memory of one element: NaN, or 0 in a dtype without NaN."""
    one = torch.full((1,), math.nan if dtype.is_floating_point or dtype.is_complex else 0, dtype=dtype, device=device)
    return expanded(one, shape)


def expanded(one: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The one element of `one`, expanded to a shape."""
    return one.as_strided(tuple(shape), (0,) * len(shape))


def rest(parameter: torch.Tensor, record: Resting, value: torch.Tensor) -> None:
    """Let the parameter rest; `value` is an `expanded_nan` of its shape."""
    show_values(parameter, value)
    vars(parameter)[_RECORD] = record
    parameter.__class__ = resting_class(type(parameter))


def show_values(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Give the parameter its own class and these values."""
    parameter.__class__ = whole_class(parameter)
    holder_of(parameter).data = value
