"""Remembers what operations gave, so that the hundredth block of a model costs little to trace.

    (operation, shapes, strides and dtypes of its tensors, everything else)
        -> shapes, strides and dtypes of its results, and its kernel

torch works these out in Python for most operations, some hundred microseconds each time. Only what makes new tensors
is remembered: no views, no writes, no result in an argument's storage. Tensors without dims are left out, since what
they are promoted to depends on more than their dtype. Rejected: tracing one block and multiplying, which needs a rule
for what repeats.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.planner.trace.kernels import Kernel


@dataclass(frozen=True)
class Seen:
    """The results of an operation; `single` where it gives one tensor and not a tuple."""

    shapes: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    single: bool
    kernel: Kernel | None

    def again(self) -> Any:
        """New tensors like those."""
        made = tuple(
            torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in self.shapes
        )
        return made[0] if self.single else made


class Recall:
    """What was seen so far."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Seen] = {}

    def key(self, op: Any, args: Any, kwargs: Any) -> Hashable | None:
        """What the results depend on; None where that can't be told."""
        if op.is_view or op._schema.is_mutable:
            return None
        key = (op, _key(args), _key(tuple(kwargs.items())))
        try:
            hash(key)
        except TypeError:
            return None
        return None if _UNKNOWN in (key[1], key[2]) else key

    def find(self, key: Hashable | None) -> Seen | None:
        return None if key is None else self._seen.get(key)

    def keep(self, key: Hashable | None, result: Any, inputs: Sequence[torch.Tensor], kernel: Kernel | None) -> None:
        """Remember a result, if it is nothing but new tensors."""
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
        self._seen[key] = Seen(shapes, isinstance(result, torch.Tensor), kernel)


_UNKNOWN = object()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, and as it seems."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return whole and not tensor.is_conj() and not tensor.is_neg()


def _key(value: Any) -> Hashable:
    """`value` as something to look up by; _UNKNOWN where that is not all that matters."""
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
