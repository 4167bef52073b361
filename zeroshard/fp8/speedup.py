"""Predicts the speedup of a linear layer by fp8 from the rates of one GPU, so that all ranks choose the same layers.

    bf16    three products
    fp8     three products at fp8's rate, and passes over memory: input and gradient are read twice and written twice
            (codes and transposed codes), and the weight's codes are transposed

The rates were measured on an H200 (docs/decisions/0034-products-in-fp8.md). Small products do not become faster, since
casts and launches take as long as the product. Rejected: timing each layer at the start; by noise, ranks would choose
different layers, and a plan that is made without the cluster's GPU would differ from the cluster's.
"""

from __future__ import annotations

_BF16 = 6.9e14
_FP8 = 1.23e15
"""Flops per second of products with some thousand rows and columns."""
_MEMORY = 3.0e12
"""Bytes per second of the casts."""
_LAUNCH = 4e-6
"""Seconds of a very small kernel."""
_KERNELS_BF16, _KERNELS_FP8 = 3, 8
HOST_SECONDS = 2.5e-4
"""Host time of a step that a layer in fp8 adds to that of one in bf16, compiled: casts and codes are kernels of Triton.
Where the products take the GPU less time, it waits for the host, and a model of such layers is slower in fp8."""

AROUND_SECONDS = 5.5e-4
"""Host time of a step for each linear layer of a compiled block, with all that lies around it: 3.0 to 3.9 ms for the
seven of a block of Llama's shape. A model whose chosen layers take the GPU less, divided by all of its layers, waits
for its host, and fp8 gives that more to do."""

STEP_SECONDS = 1.5e-2
"""Host time of a whole step that no layer has a part in, compiled: root, optimizer and loop. The smallest models take
it too. A model whose products take the GPU less is as slow as its host, and fp8 gives that more to do."""


def seconds_in_bf16(out_features: int, in_features: int, rows: int) -> float:
    """Seconds that the three products of a layer's forward and backward take the GPU in bf16."""
    return 3 * max(2.0 * out_features * in_features * rows / _BF16, _LAUNCH)


def speedup(out_features: int, in_features: int, rows: int) -> float:
    """The time of a layer's forward and backward in bf16 over that in fp8.

    Args:
        rows: rows of the input, all dims but the last together.
    """
    flops = 2.0 * out_features * in_features * rows
    casts = 6.0 * rows * (out_features + in_features) + 2.0 * out_features * in_features
    plain = seconds_in_bf16(out_features, in_features, rows)
    ours = 3 * max(flops / _FP8, _LAUNCH) + casts / _MEMORY + (_KERNELS_FP8 - _KERNELS_BF16) * _LAUNCH
    return plain / ours
