"""Losses made of whole parameters inside a GatheredParameters block, whose backward comes after the block.

    with zeroshard.GatheredParameters(weight):
        loss = weight.abs().sum()          autograd saves what the operation was given
    loss.backward()                        the parameter rests again, what was saved is still there

Autograd saves a parameter as the parameter, and finds there what it is at the time of the backward: at rest NaN, whose
sign is 0. So inside of the block an operation is given a view of the parameter, which keeps the block's memory as long
as the graph has it, and leads to the parameter's gradient. Functions of classes derived from `autograd.Function` take
the parameter itself. Rejected: hooks on saved tensors, under which torch.func refuses to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from zeroshard.sharding.resting import ALLOWED_CALLS, name_of_call

_TAKE_THE_PARAMETER = ALLOWED_CALLS | {
    *("backward", "detach", "numpy", "view_as", "expand_as", "size", "dim", "numel", "stride", "is_contiguous"),
    *("__deepcopy__", "__reduce__", "__reduce_ex__", "__repr__", "__format__", "__hash__", "__len__", "__setitem__"),
    *("data_ptr", "untyped_storage", "storage", "ndimension", "nelement", "storage_offset", "__setstate__"),
}
"""What saves nothing of the values, or is about the parameter itself. `view_as` and `expand_as` with itself are how
code finds the node at which its gradient arrives."""


class BlockReads(TorchFunctionMode):
    """Gives operations views of the parameters that a block holds, from `begin` to `end`."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, torch.Tensor] = {}
        self._on = False

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Start with these parameters; others, and those of classes with a meaning of their own, are left alone."""
        self._held = {id(one): one for one in parameters if type(one) is nn.Parameter or isinstance(one, DTensor)}
        self._on = bool(self._held)
        if self._on:
            self.__enter__()

    def end(self) -> None:
        """The parameters rest again."""
        self._held = {}  # if blocks end in another order than they began, another one's mode leaves the stack first
        if self._on:
            self._on = False
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A compiled graph saves its own inputs, and can't look for parameters among them.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not _saves(func, kwargs):
            return func(*args, **kwargs)
        views: dict[int, torch.Tensor] = {}
        answer = func(*self._viewed(args, views), **self._viewed(kwargs, views))
        # `p.contiguous()` and `p.to(dtype)` return what they were given, if there is nothing to do.
        return next((self._held[number] for number, view in views.items() if view is answer), answer)

    def _viewed(self, value: Any, views: dict[int, torch.Tensor]) -> Any:
        """Arguments with views in the place of parameters that the block holds."""
        if isinstance(value, torch.Tensor):
            number = id(value)
            if number not in self._held:
                return value
            if number not in views:
                views[number] = torch.ops.aten.alias.default(value)
            return views[number]
        if type(value) in (tuple, list):
            return type(value)(self._viewed(item, views) for item in value)
        if isinstance(value, Mapping) and type(value) is dict:
            return {key: self._viewed(item, views) for key, item in value.items()}
        return value


def _saves(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether autograd may save an argument of this call."""
    name, _ = name_of_call(func)
    attribute = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
    in_place = kwargs.get("out") is not None or (name.endswith("_") and not name.endswith("__"))
    about_graphs = str(getattr(func, "__module__", "")).startswith("torch.autograd")
    return not (attribute or in_place or about_graphs or name in _TAKE_THE_PARAMETER)
