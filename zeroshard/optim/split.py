"""float32 master weights as a bfloat16 and its 16-bit remainder: exact, 2 bytes a parameter less than beside a copy.

    float32 bits   [ sign | exponent | mantissa .................... ]
                   [ bfloat16: rounded upper half ] + [ int16: what rounding took away or added ]

The upper half *is* the compute-dtype parameter, so only the remainder is extra. Halves are rounded away from zero: then
the remainder of a tie always fits into 16 bits, which it does not under ties-to-even.
"""

from __future__ import annotations

import torch


def join(upper: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 values of bfloat16 `upper` and int16 `remainder`, elementwise."""
    bits = (upper.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)
    return bits.view(torch.float32)


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 and int16 remainder of float32 `values`; `join` gives exactly `values` back."""
    bits = values.contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16
    remainder = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)
