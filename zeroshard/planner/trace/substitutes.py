"""Traces as a GPU runs them those functions for which the meta device runs other code.

    scaled_dot_product_attention    flash or memory-efficient attention: keeps one log-sum per row, no matrix of scores
    rms_norm                        one kernel; keeps its input and one number per row
    dropout                         one kernel; keeps a mask of one byte per element

On the meta device torch decomposes all three and would keep far more for the backward. Here each is an autograd
function that allocates what the GPU's kernels allocate. Rejected: fake CUDA tensors, which run the GPU's code without
such functions; a torch that was built without CUDA can't run autograd on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from zeroshard.planner.trace.exchanges import ExchangePoint
from zeroshard.planner.trace.kernels import Kernel, KernelKind

Record = Callable[[Kernel], None]

_CONSTRUCTORS = {
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint, torch.randperm),
    *(torch.arange, torch.linspace, torch.eye, torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.tril_indices),
    *(torch.triu_indices, torch.logspace, torch.empty_strided, torch.normal),
}
"""Functions that make tensors without any input tensor. They make meta tensors unless a device is given.

Rejected: `torch.device("meta")` around the trace; it is a second function mode, and doubles the time of a trace.
"""


class GpuPaths(TorchFunctionMode):
    """While this mode is active, the functions above run as they do on a GPU.

    Args:
        record: is called with each kernel that a substitute stands for.
        sequence: how ranks divide each sequence; None if they do not.
    """

    def __init__(self, record: Record, sequence: DividedSequence | None = None) -> None:
        super().__init__()
        self._record, self._sequence = record, sequence

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONSTRUCTORS and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        if func is functional.scaled_dot_product_attention:
            if self._sequence is not None:
                return _divided_attention(self._record, self._sequence, *args, **kwargs)
            return _attention(self._record, *args, **kwargs)
        if func in (functional.rms_norm, torch.rms_norm):
            return _rms_norm(self._record, *args, **kwargs)
        if func in (functional.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    record: Record,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    return _Attention.apply(record, query, key, value, attn_mask, is_causal)  # type: ignore[return-value]


@dataclass(frozen=True)
class DividedSequence:
    """`ranks` ranks have a part of each sequence, and exchange heads around attention (Ulysses)."""

    ranks: int
    exchange: ExchangePoint


def _divided_attention(
    record: Record,
    sequence: DividedSequence,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention of a part of the heads over the whole sequence: as many elements, `ranks` times as many keys."""
    ranks, exchange = sequence.ranks, sequence.exchange
    if query.dim() == 4 and key.shape[1] % ranks:  # heads of keys are copied until there is one for each rank
        copies = ranks // math.gcd(ranks, key.shape[1])
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)

    def longer(kernel: Kernel) -> None:
        record(replace(kernel, flops=kernel.flops * ranks))

    query, key, value = (exchange.apply(x) for x in (query, key, value))
    mixed = _attention(longer, query, key, value, None, *args, **kwargs)
    return exchange.apply(mixed)


class _Attention(torch.autograd.Function):
    """Fused attention: (..., length, width) queries, keys and values; saves the output and a log-sum per row.

    The backward accumulates the gradient of the queries in float32, and those of repeated keys and values per head of
    the queries (Dao 2023, arXiv:2307.08691, section 3.1); both are gone when it returns.
    """

    @staticmethod
    def forward(ctx: Any, record: Record, query: Any, key: Any, value: Any, mask: Any, causal: bool) -> torch.Tensor:
        out = torch.empty_like(query) if value.shape[-1] == query.shape[-1] else query.new_empty(_out(query, value))
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, sums, mask)
        ctx.record, ctx.causal = record, causal
        record(_attention_kernel(query, key, value, causal, backward=False))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, _, _, mask = ctx.saved_tensors
        accumulator = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        repeated = []
        if query.dim() == 4 and query.shape[1] != key.shape[1]:
            shape = (*query.shape[:2], *key.shape[2:])
            repeated = [query.new_empty(shape), query.new_empty(shape)]
        ctx.record(_attention_kernel(query, key, value, ctx.causal, backward=True))
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        of_mask = torch.empty_like(mask) if mask is not None and mask.requires_grad else None
        del accumulator, repeated
        return None, *found, of_mask, None


def _out(query: torch.Tensor, value: torch.Tensor) -> tuple[int, ...]:
    return (*query.shape[:-1], value.shape[-1])


def _attention_kernel(query: Any, key: Any, value: Any, causal: bool, *, backward: bool) -> Kernel:
    """Two products of (length, width) with (width, keys) forward, five backward; half of them where it is causal."""
    products = 5 if backward else 2
    flops = products * (query.numel() // query.shape[-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    nbytes = (2 if backward else 1) * sum(t.numel() * t.element_size() for t in (query, key, value, query))
    return Kernel(KernelKind.ATTENTION, flops // 2 if causal else flops, nbytes, query.dtype)


def _rms_norm(
    record: Record, input: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> torch.Tensor:
    return _RmsNorm.apply(record, input, len(normalized_shape), weight)  # type: ignore[return-value]


class _RmsNorm(torch.autograd.Function):
    """Root mean square norm over the last `dims` dims: saves its input and one float32 per row."""

    @staticmethod
    def forward(ctx: Any, record: Record, x: torch.Tensor, dims: int, weight: torch.Tensor | None) -> torch.Tensor:
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        rows = torch.empty((*x.shape[:-dims], *(1,) * dims), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        ctx.record = record
        record(Kernel(KernelKind.ELEMENTWISE, 0, 2 * x.numel() * x.element_size(), x.dtype))
        return torch.empty(x.shape, dtype=dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        ctx.record(Kernel(KernelKind.ELEMENTWISE, 0, 3 * x.numel() * x.element_size(), x.dtype))
        return None, torch.empty_like(x), None, None if weight is None else torch.empty_like(weight)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    train = training if isinstance(training, bool) else True
    return torch.native_dropout(input, p, True)[0] if train and 0.0 < p < 1.0 else input
