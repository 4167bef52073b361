"""What a linear layer gains by fp8, reckoned from the rates of one GPU, so that all ranks decide alike.

    bf16    three products
    fp8     three products at fp8's rate, and passes over memory: input and gradient are read twice and written twice
            (as codes, straight and transposed), the weight's codes are transposed

The rates are those that an H200 was measured at (docs/decisions/0034-products-in-fp8.md). Small products gain nothing,
since casts and launches take as long as the product. Rejected: to time each layer at the start; ranks would decide
differently from noise, and a plan made beside a GPU would not be the one of the cluster.
"""

from __future__ import annotations

_BF16 = 6.9e14
_FP8 = 1.23e15
"""FLOP/s of products of some thousand rows and columns."""
_MEMORY = 3.0e12
"""Bytes/s of the casts."""
_LAUNCH = 4e-6
"""Seconds of a kernel that does nearly nothing."""
_KERNELS_BF16, _KERNELS_FP8 = 3, 8


def gain(out_features: int, in_features: int, rows: int) -> float:
    """Times that a forward and backward of a layer in fp8 are as fast as in bf16."""
    flops = 2.0 * out_features * in_features * rows
    casts = 6.0 * rows * (out_features + in_features) + 2.0 * out_features * in_features
    plain = 3 * max(flops / _BF16, _LAUNCH)
    ours = 3 * max(flops / _FP8, _LAUNCH) + casts / _MEMORY + (_KERNELS_FP8 - _KERNELS_BF16) * _LAUNCH
    return plain / ours
