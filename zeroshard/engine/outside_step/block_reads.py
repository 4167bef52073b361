"""Losses made of whole parameters inside a GatheredParameters block, whose backward comes after the block.

    with zeroshard.GatheredParameters(weight):
        loss = weight.abs().sum()          autograd saves what the operation was given
    loss.backward()                        the parameter rests again, what was saved is still there

Autograd saves a parameter as the parameter, and finds there what it is at the time of the backward: at rest NaN, whose
sign is 0. So inside of the block an operation is given a view of the parameter, which keeps the block's memory as long
as the graph has it, and leads to the parameter's gradient. Inside of torch.func's transforms the operations get tensors
that wrap the parameter, and views of those are made. Functions of classes derived from `autograd.Function`, compiled
ones among them, take the parameter itself. Rejected: hooks on saved tensors, under which torch.func refuses to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from zeroshard.sharding.resting import ALLOWED_CALLS, changes_first, name_of_call

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
        """Start with these parameters."""
        self._held = {id(one): one for one in parameters}
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
        views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # The parameter itself is changed: torch refuses to change some views.
        changed = args[:1] if changes_first(name_of_call(func)[0]) else ()
        answer = func(*changed, *self._viewed(args[len(changed) :], views), **self._viewed(kwargs, views))
        # `p.contiguous()` and `p.to(dtype)` return what they were given, if there is nothing to do.
        return next((given for given, view in views.values() if view is answer), answer)

    def _viewed(self, value: Any, views: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Arguments with views in the place of parameters that the block holds.

        Args:
            views: what was replaced by which view; it is added to.
        """
        if isinstance(value, torch.Tensor):
            number = id(value)
            if number not in views:
                if not self._holds(value):
                    return value
                views[number] = (value, _view_of(value))
            return views[number][1]
        if isinstance(value, (tuple, list)):
            items = [self._viewed(item, views) for item in value]
            if all(item is before for item, before in zip(items, value, strict=True)):
                return value
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, Mapping) and type(value) is dict:
            return {key: self._viewed(item, views) for key, item in value.items()}
        return value

    def _holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is a parameter of the block, or what torch.func's transforms made of one."""
        while is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        return id(tensor) in self._held


def _view_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same class, with the same attributes."""
    view = torch.ops.aten.alias.default(tensor)
    if type(tensor) not in (torch.Tensor, nn.Parameter, type(view)):
        with torch._C.DisableTorchFunctionSubclass():
            view = view.as_subclass(type(tensor))
        vars(view).update(vars(tensor))
    return view


def _saves(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether autograd may save an argument of this call."""
    name, _ = name_of_call(func)
    attribute = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
    about_graphs = str(getattr(func, "__module__", "")).startswith("torch.autograd")
    changes_by_name = changes_first(name) and any(key in kwargs for key in ("self", "input", "tensor"))
    return not (attribute or about_graphs or changes_by_name or kwargs.get("out") is not None) and (
        name not in _TAKE_THE_PARAMETER
    )
