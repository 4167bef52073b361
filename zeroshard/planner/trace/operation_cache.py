"""Caches what operations return on meta tensors, so that the hundredth block of a model costs little to trace.

    (operation, shapes, strides and dtypes of its tensors, all other arguments)
        -> shapes, strides and dtypes of its results, and its kernel

torch computes these in Python for most operations, in some hundred microseconds each. Only operations that return new
tensors are cached: no views, no writes, no result in an argument's storage. Tensors without dims are not cached either,
since their type promotion depends on more than their dtype. Rejected: tracing one block and multiplying, which needs a
rule for what repeats.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.planner.trace.kernels import Kernel


@dataclass(frozen=True)
class CachedResult:
    """The results of an operation; `single` if it returns one tensor, not a tuple."""

    shapes: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    single: bool
    kernel: Kernel | None

    def new_tensors(self) -> Any:
        """New meta tensors like the results, as the operation would return them."""
        made = tuple(
            torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in self.shapes
        )
        return made[0] if self.single else made


class OperationCache:
    """The results of all operations so far."""

    def __init__(self) -> None:
        self._results: dict[Hashable, CachedResult] = {}

    def key(self, op: Any, args: Any, kwargs: Any) -> Hashable | None:
        """All that the results depend on, as a key; None for an operation that is not cached."""
        if op.is_view or op._schema.is_mutable:
            return None
        key = (op, _key(args), _key(tuple(kwargs.items())))
        try:
            hash(key)
        except TypeError:
            return None
        return None if _UNKNOWN in (key[1], key[2]) else key

    def find(self, key: Hashable | None) -> CachedResult | None:
        """The cached result; None if there is none."""
        return None if key is None else self._results.get(key)

    def store(self, key: Hashable | None, result: Any, inputs: Sequence[torch.Tensor], kernel: Kernel | None) -> None:
        """Store a result, if it is made of new tensors only."""
        outputs = (result,) if isinstance(result, torch.Tensor) else result
        if key is None or not isinstance(outputs, tuple) or not outputs:
            return
        if not all(type(tensor) is torch.Tensor and tensor.is_meta and _is_plain(tensor) for tensor in outputs):
            return
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        made = {tensor.untyped_storage()._cdata for tensor in outputs}
        if made & given or len(made) < len(outputs):
            return
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in outputs)
        self._results[key] = CachedResult(shapes, isinstance(result, torch.Tensor), kernel)


_UNKNOWN = object()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor takes all of its storage, and is neither conjugated nor negated lazily."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return whole and not tensor.is_conj() and not tensor.is_neg()


def _key(value: Any) -> Hashable:
    """`value` as a part of a key; _UNKNOWN if results may depend on more than the key can hold."""
    if isinstance(value, torch.Tensor):
        if not value.dim() or not value.is_meta or value.is_conj() or value.is_neg():
            return _UNKNOWN
        # The extent of its storage decides how many bytes an expanded one counts for.
        return (value.shape, value.stride(), value.dtype, value.untyped_storage().nbytes())
    if isinstance(value, (list, tuple)):
        parts = tuple(_key(item) for item in value)
        return _UNKNOWN if _UNKNOWN in parts else (type(value).__name__, parts)
    # True, 1 and 1.0 are equal, and are not the same argument.
    return (type(value), value)
