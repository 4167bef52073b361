"""Placeholders for sharded gradients and parameters: they have a shape and dtype, and refuse computation and saving.

Sharded gradients are in the engine's buffers. Without a placeholder, code that reads `parameter.grad` between a
backward and the step (above all torch.nn.utils.clip_grad_norm_) would find None, return a norm of 0 and clip nothing.
Likewise, saving a `state_dict()` that only names sharded parameters would write no values. Rejected: None, which gives
no error.

Under no_sync this rank's whole gradient is in one of the buffers, as torch's DistributedDataParallel leaves it on the
parameter. Then the placeholder can be computed with: it acts as that part of the buffer, in the buffer's dtype.
Rejected: a copy in the parameter's dtype, since changes of the copy would be lost without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeroshard.errors import UsageError
from zeroshard.sharding.resting import changes_first, name_of_call

_READABLE = frozenset(
    {"shape", "dtype", "device", "requires_grad", "is_sparse", "layout", "grad_fn", "is_leaf"}
    | {"is_meta", "is_cuda", "is_cpu", "ndim", "nbytes", "itemsize"}
    | {"_base", "grad", "is_mkldnn", "is_nested", "is_quantized"}
)
_METHODS = frozenset(
    {"size", "numel", "dim", "detach", "requires_grad_", "data_ptr", "untyped_storage"}
    # torch.compile describes the gradient of each parameter, also where it compiles anew amid an accumulation.
    | {"_is_view", "is_conj", "is_neg", "is_inference", "storage_offset", "stride", "is_complex", "is_floating_point"}
)
_Local = Callable[[], "torch.Tensor | None"]
"""Returns this rank's whole gradient as a view of its buffer; None if it may not be read."""
_SAVES = frozenset({"__reduce_ex__", "numpy", "__array__", "tolist", "item"})
_ALIASES = frozenset({"detach", "alias", "view", "as_strided"})
"""Operations that leave the memory alone, by their names in aten."""


class ShardedGradient(torch.Tensor):
    """The placeholder of a gradient. Its shape and dtype may be read; everything else raises UsageError.

    That goes for autograd too, which asks nobody in Python before it adds: of a loss that has not come through the
    model (a penalty over parameters by itself) it would add the gradient to what the stand-in stands on.

    Attributes:
        local: gives what everything else is done with instead, while there is something to give.
        of: the name of the parameter.
    """

    local: _Local | None = None
    of: str = ""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        called, sets = name_of_call(func)
        options = dict(kwargs or {})
        described = called in _METHODS or called in _READABLE
        if not sets and (called != "detach" and described):
            return super().__torch_function__(func, types, args, options)
        values = None if sets else _with_local((args, options))
        if values is not None:
            result = func(*values[0], **values[1])
            return args[0] if changes_first(called) and isinstance(args[0], cls) else result
        if not sets and described:
            return super().__torch_function__(func, types, args, options)
        raise UsageError(
            f"torch's {called}: the gradients of this model are sharded, parameter.grad holds nothing to compute with. "
            "To clip, set clip_norm in the plan (gradient_clipping in the config) or call "
            "zeroshard.clip_grad_norm_(model, max_norm), by value gradient_clip_value or "
            "zeroshard.clip_grad_value_(model, clip_value); to read the norm, zeroshard.get_global_grad_norm(model); "
            "to drop them all, zero_grad() with set_to_none=True, the default"
        )

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Raises UsageError for what autograd does in C++."""
        if name_of_call(func)[0] in _ALIASES:
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))
        name = next((arg.of for arg in args if isinstance(arg, cls)), "")
        raise UsageError(
            f"{f'parameter {name!r}' if name else 'a parameter'} got a gradient of a loss that did not come through the"
            " model's forward, after a backward of the model and before its step: the gradients are in the engine's "
            "buffers, where it would be missing. Add this loss to that of the model and call one backward, inside of "
            "GatheredParameters if it reads sharded parameters there; or compute it in the model's forward"
        )

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return "ShardedGradient(held by zeroshard)"


class ConsumedGradient(ShardedGradient):
    """The placeholder on one parameter from a step, which consumes all gradients, to the next backward.

    It shows whether a script drops its gradients after the step, by whatever way: `model.zero_grad()` and
    `parameter.grad = None` ask no engine. It may be zeroed, which drops it, too.

    Attributes:
        dropped: whether it was zeroed.
    """

    dropped: bool = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        called, _ = name_of_call(func)
        if called == "detach_":
            return args[0]
        if called not in ("zero_", "_foreach_zero_"):
            return super().__torch_function__(func, types, args, kwargs)
        several = args[0] if isinstance(args[0], (tuple, list)) else (args[0],)
        others = [one for one in several if not isinstance(one, cls)]
        for one in several:
            if isinstance(one, cls):
                one.dropped = True
        if others:
            func(others)
        return args[0] if called == "zero_" else None


def _with_local(value: Any) -> Any:
    """Arguments with this rank's gradients in place of their placeholders; None if one has no readable gradient."""
    if isinstance(value, ShardedGradient):
        return own_gradient(value)
    if isinstance(value, Mapping):
        items = {key: _with_local(item) for key, item in value.items()}
        return None if any(items[key] is None and value[key] is not None for key in items) else items
    if isinstance(value, (tuple, list)):
        values = [_with_local(item) for item in value]
        missing = any(new is None and old is not None for new, old in zip(values, value, strict=True))
        return None if missing else values if isinstance(value, list) else tuple(values)
    return value


def own_gradient(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's whole gradient behind a placeholder, as a view; None if it may not be read."""
    if not isinstance(gradient, ShardedGradient) or gradient.local is None:
        return None
    return gradient.local()


class ShardedValue(torch.Tensor):
    """The placeholder of a parameter in a `state_dict()` with names and shapes only: a meta tensor that refuses saving.

    Everything else is allowed: `save_pretrained` assembles files on all ranks, and writes on one.
    """

    coded: torch.Tensor | None = None
    """The parameter, if it rests whole in fp8."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") not in _SAVES:
            try:
                return super().__torch_function__(func, types, args, dict(kwargs or {}))
            except (NotImplementedError, RuntimeError) as error:
                if "meta" not in str(error).lower():
                    raise
        raise UsageError(
            "the parameters of this model are sharded or rest in fp8, state_dict() has names and shapes alone. To save "
            "weights, call trainer.save_model(), accelerator.save_model(), or model.save_pretrained(folder, "
            "state_dict=accelerator.get_state_dict(engine)) with stage3_gather_16bit_weights_on_model_save in the "
            "config; or take state_dict() inside deepspeed.zero.GatheredParameters(model.parameters())"
        )

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return f"ShardedValue({tuple(self.shape)}, held by zeroshard)"


def sharded_gradient(parameter: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A placeholder with the shape, dtype and device that `parameter.grad` must have, without memory of its own.

    Args:
        memory: any memory of the parameter's shape; its values are not read.
    """
    placeholder = parameter.detach()
    placeholder.data = memory
    return sharded_gradient_of(placeholder)


def sharded_gradient_of(placeholder: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape, dtype and device as a placeholder of its gradient."""
    return placeholder.as_subclass(ShardedGradient)


def consumed_gradient_of(placeholder: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape, dtype and device as what a step leaves of its gradient."""
    return placeholder.as_subclass(ConsumedGradient)


def sharded_value(dtype: torch.dtype, shape: Sequence[int], coded: torch.Tensor | None = None) -> torch.Tensor:
    """A placeholder for a whole parameter; `coded` is the parameter itself, if it rests whole in fp8."""
    placeholder = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(ShardedValue)
    placeholder.coded = coded
    return placeholder
