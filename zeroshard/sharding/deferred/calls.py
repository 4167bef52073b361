"""Let deferred tensors look like ordinary ones to user code while a model is being built.

A function mode changes the few calls in which a meta tensor would behave differently, or lose data before the
dispatcher sees it:

    torch.empty(4), torch.empty(4, device=d)    made on the meta device, when d is the device of the tape
    torch.tensor([1.0]), x.new_tensor(1.0)      made real, then deferred with their values
    x.device, x.is_meta                         the device of the tape, False
    x.to(d), x.cpu()                            no copy when x is "on" d already
    x.tolist(), x.numpy()                       the value, made immediately

This is needed: torch's own `trunc_normal_`, `orthogonal_` and `sparse_` do nothing for a tensor whose `is_meta` is
true, and transformers skips all initialisation inside `torch.device("meta")`. With that context the weights would be
different ones, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from zeroshard.sharding.deferred.tape import Tape, mark_of

# Calls that make a tensor from nothing.
_FACTORIES = frozenset(
    {torch.empty, torch.empty_permuted, torch.empty_strided, torch.zeros, torch.ones, torch.full, torch.scalar_tensor}
    | {torch.arange, torch.range, torch.linspace, torch.logspace, torch.eye, torch.tril_indices, torch.triu_indices}
    | {torch.rand, torch.randn, torch.randint, torch.randperm, torch.fft.fftfreq, torch.fft.rfftfreq}
    | {torch.bartlett_window, torch.blackman_window, torch.hamming_window, torch.hann_window, torch.kaiser_window}
)
_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})
_GET_DEVICE = cast(Any, torch.Tensor).device.__get__
_GET_IS_META = cast(Any, torch.Tensor).is_meta.__get__
_META = torch.device("meta")


def active_watcher() -> CallWatcher | None:
    """The watcher of the `Init` that is open here, found through torch's stack of function modes."""
    probe = (None,)  # no tensor among the arguments: only a mode can answer, and only ours does
    return handle_torch_function(active_watcher, probe) if has_torch_function(probe) else None


def active_tape() -> Tape | None:
    """The tape of the `Init` that is open here; None if none is."""
    watcher = active_watcher()
    return None if watcher is None else watcher.tape


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, nothing is recorded and tensors are real, as if the open `Init` had been closed."""
    watcher = active_watcher()
    if watcher is None:
        yield
        return
    watcher.paused = True
    try:
        yield
    finally:
        watcher.paused = False


class CallWatcher(TorchFunctionMode):
    """Lets deferred tensors of `tape` look like ordinary ones.

    Args:
        evaluate: makes the present value of a deferred tensor.

    Attributes:
        depth: how many torch calls are being handled, one inside the other.
        paused: whether this mode changes and records nothing at present.
        finish_model: does to a model what the end of the `Init` does, while that is still open; None if that does
            nothing.
    """

    def __init__(self, tape: Tape, evaluate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.tape = tape
        self.evaluate = evaluate
        self.depth = 0
        self.paused = False
        self.finish_model: Callable[[nn.Module], None] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is active_watcher:
            return None if self.paused else self
        if self.paused:
            return func(*args, **(kwargs or {}))
        self.depth += 1
        try:
            kwargs = dict(kwargs or {})
            first = args[0] if args else None
            if func in _FROM_DATA and self._on_tape_device(kwargs.get("device")):
                return _from_data(func, args, kwargs)
            if func in _FACTORIES or (func is torch.normal and _normal_of_size(args, kwargs)):
                return func(
                    *args, **(kwargs | {"device": _META} if self._on_tape_device(kwargs.get("device")) else kwargs)
                )
            if isinstance(first, torch.Tensor) and mark_of(first) is not None:
                return self._on_deferred(func, first, args[1:], kwargs)
            return func(*args, **kwargs)
        finally:
            self.depth -= 1

    def _on_deferred(
        self, func: Callable[..., Any], tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func == _GET_DEVICE:
            return self.tape.device
        if func == _GET_IS_META:
            return False
        if func is torch.Tensor.tolist:
            return self.evaluate(tensor).tolist()
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            array = func(self.evaluate(tensor), *args, **kwargs)
            array.flags.writeable = False  # a write would not change the tensor
            return array
        if func is torch.Tensor.cpu and self.tape.device.type == "cpu":
            return tensor
        if func is torch.Tensor.to:
            args = tuple(
                _META if isinstance(arg, str | torch.device) and self._on_tape_device(arg) else arg for arg in args
            )
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (_tensors_for_lists(args[0]), *args[1:])
        if kwargs.get("device") is not None and self._on_tape_device(kwargs["device"]):
            kwargs["device"] = _META
        return func(tensor, *args, **kwargs)

    def _on_tape_device(self, device: torch.device | str | int | None) -> bool:
        """Whether a device argument means the device of the tape, as None does."""
        if device is None:
            return True
        device = torch.device(device)
        return device.type == self.tape.device.type and device.index in (None, self.tape.device.index)


def _from_data(func: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Make a tensor from Python data, then defer it. An empty one stays real: libraries ask it for the device."""
    if func is torch.Tensor.new_tensor:
        args = (torch.empty(0, dtype=args[0].dtype, device="cpu"), *args[1:])
        data = args[1] if len(args) > 1 else kwargs.get("data")
    else:
        data = args[0] if args else next(iter(kwargs.values()))
    if isinstance(data, torch.Tensor):
        return func(*args, **(kwargs | {"device": data.device}))
    real = func(*args, **(kwargs | {"device": "cpu"}))
    if real.numel() == 0:
        return real
    return real.detach().to(_META).requires_grad_(cast(bool, kwargs.get("requires_grad", False)))


def _tensors_for_lists(index: Any) -> Any:
    """An index such as `x[[0, 2]]` or `x[:, array]` as tensors; torch would lose its values on the device of `x`."""
    if isinstance(index, tuple):
        return tuple(_tensors_for_lists(part) for part in index)
    return _from_data(torch.tensor, (index,), {}) if isinstance(index, list | np.ndarray) else index


def _normal_of_size(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `torch.normal` was called with numbers and a size, the one form that makes a tensor from nothing."""
    return "out" not in kwargs and ("size" in kwargs or len(args) > 2)
