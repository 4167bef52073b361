"""Tells what one aten operation costs, without a device: its floating-point operations, bytes and kind of kernel.

    matrix products, convolutions, attention    flops, and the bytes of their operands
    everything else that computes                bytes read and written (such kernels are bound by memory)
    views and allocations                        nothing

Rejected: torch's flop counter. It counts no bytes, and memory bounds two thirds of a block's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

aten = torch.ops.aten


class KernelKind(str, Enum):
    """Kinds of kernels; each kind reaches its own share of the peak of arithmetic or memory."""

    GEMM = "matrix products"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"


@dataclass(frozen=True)
class Kernel:
    """One kernel launch: floating-point operations, bytes read and written, and the dtype of its arithmetic."""

    kind: KernelKind
    flops: int
    nbytes: int
    dtype: torch.dtype


_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_PRODUCTS = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten._scaled_mm.default: (0, 1),
}
_CONVOLUTIONS = {aten.convolution.default, aten._convolution.default, aten.convolution_backward.default}
_GROUPED = {aten._grouped_mm.default}


def kernel_of(op: Any, args: tuple[Any, ...], inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Kernel | None:
    """The kernel that `op` launches; None if it launches none.

    Args:
        args: positional arguments of the operation.
        inputs, outputs: the tensors among its arguments and results.
    """
    if op in _ALLOCATIONS or not outputs or op.is_view or _only_views(op, inputs, outputs):
        return None
    moved = _nbytes(inputs) + _nbytes(outputs)
    dtype = outputs[0].dtype
    if op in _PRODUCTS:
        left, right = (args[index] for index in _PRODUCTS[op])
        return Kernel(KernelKind.GEMM, 2 * left.numel() * right.shape[-1], moved, left.dtype)
    if op in _GROUPED:
        return Kernel(KernelKind.GEMM, _grouped_flops(args[0], args[1]), moved, args[0].dtype)
    if op in _CONVOLUTIONS:
        return Kernel(KernelKind.GEMM, _convolution_flops(op, args, outputs), moved, dtype)
    return Kernel(KernelKind.ELEMENTWISE, 0, moved, dtype)


def _only_views(op: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether the results are views of the arguments and nothing was written."""
    if op._schema.is_mutable:
        return False
    held = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in held for tensor in outputs)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that a kernel touches: an expanded tensor is read once."""
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def _grouped_flops(left: torch.Tensor, right: torch.Tensor) -> int:
    """Each row is multiplied by the matrix of its own group only (each column, if the sum runs over the tokens)."""
    return 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _convolution_flops(op: Any, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> int:
    if op is aten.convolution_backward.default:
        gradient, weight = args[0], args[2]
        products = sum(bool(wanted) for wanted in args[10][:2])
    else:
        gradient, weight, products = outputs[0], args[1], 1
    return 2 * products * gradient.numel() * math.prod(weight.shape[1:])
