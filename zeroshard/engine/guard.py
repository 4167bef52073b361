"""What `parameter.grad` is between a backward and the step: a stand-in that refuses to be computed with.

Sharded gradients live in the engine's buffers. Code that reads `parameter.grad` (torch.nn.utils.clip_grad_norm_ first
of all) would otherwise find nothing, return a norm of 0 and clip nothing. Rejected: leaving None, which is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeroshard.errors import UsageError

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


class ShardedGradient(torch.Tensor):
    """A gradient that is elsewhere. Its shape and dtype may be read; everything else is a UsageError."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _METHODS or (name == "__get__" and owner in _READABLE):
            return super().__torch_function__(func, types, args, dict(kwargs or {}))
        called = owner if owner.isidentifier() else name
        raise UsageError(
            f"torch's {called}: the gradients of this model are sharded, parameter.grad holds nothing to compute with. "
            "To clip, set clip_norm in the plan (gradient_clipping in the config) or call "
            "zeroshard.clip_grad_norm_(model, max_norm); to read the norm, zeroshard.get_global_grad_norm(model)"
        )

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return "ShardedGradient(held by zeroshard)"


def sharded_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A stand-in with the shape, dtype and device that `parameter.grad` must have, without memory of its own."""
    # It refuses to be computed with, so it may as well stand on the parameter's own memory.
    return parameter.detach().as_subclass(ShardedGradient)
