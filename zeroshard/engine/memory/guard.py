"""Stand-ins for tensors that are elsewhere: their shape may be read, and they refuse to be computed with, or saved.

Sharded gradients live in the engine's buffers. Code that reads `parameter.grad` between a backward and the step
(torch.nn.utils.clip_grad_norm_ first of all) would otherwise find nothing, return a norm of 0 and clip nothing.
Rejected: leaving None, which is silent. Where `state_dict()` names sharded parameters, saving it would write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeroshard.errors import UsageError
from zeroshard.sharding.resting import name_of_call

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
_SAVES = frozenset({"__reduce_ex__", "numpy", "__array__", "tolist", "item"})


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
        called, sets = name_of_call(func)
        if not sets and (called in _METHODS or called in _READABLE):
            return super().__torch_function__(func, types, args, dict(kwargs or {}))
        raise UsageError(
            f"torch's {called}: the gradients of this model are sharded, parameter.grad holds nothing to compute with. "
            "To clip, set clip_norm in the plan (gradient_clipping in the config) or call "
            "zeroshard.clip_grad_norm_(model, max_norm), by value gradient_clip_value or "
            "zeroshard.clip_grad_value_(model, clip_value); to read the norm, zeroshard.get_global_grad_norm(model)"
        )

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return "ShardedGradient(held by zeroshard)"


class ShardedValue(torch.Tensor):
    """A parameter in a `state_dict()` that gives names and shapes alone: a meta tensor that says so when it is saved.

    Everything else may be done with it. `save_pretrained` puts files together on all ranks, and writes on one.
    """

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
            "the parameters of this model are sharded, state_dict() has their names and shapes alone. To save weights, "
            "call trainer.save_model(), accelerator.save_model(), or model.save_pretrained(folder, "
            "state_dict=accelerator.get_state_dict(engine)) with stage3_gather_16bit_weights_on_model_save in the "
            "config; or take state_dict() inside deepspeed.zero.GatheredParameters(model.parameters())"
        )

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return f"ShardedValue({tuple(self.shape)}, held by zeroshard)"


def sharded_gradient(parameter: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A stand-in with the shape, dtype and device that `parameter.grad` must have, without memory of its own.

    Args:
        memory: what it stands on, for it refuses to be computed with; of the parameter's shape.
    """
    stand_in = parameter.detach()  # has the parameter's version counter: what autograd adds to it is seen there
    stand_in.data = memory
    return sharded_gradient_of(stand_in)


def sharded_gradient_of(stand_in: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape, dtype and device as a stand-in."""
    return stand_in.as_subclass(ShardedGradient)


def sharded_value(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A stand-in for a whole parameter."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(ShardedValue)
