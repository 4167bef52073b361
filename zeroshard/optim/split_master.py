"""float32 master weights as a bfloat16 parameter and a 16-bit remainder: exact, and 2 bytes less per parameter.

    float32 bits   [ sign | exponent | mantissa .................... ]
                   [ bfloat16: rounded upper half ] + [ int16: the rounding error ]

The upper half is the compute-dtype parameter itself, so only the remainder takes extra memory. Ties are rounded away
from zero: then the remainder of a tie always fits into 16 bits, which it does not with ties to even.
"""

from __future__ import annotations

import torch


def join(upper: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 values of bfloat16 `upper` and int16 `remainder`, elementwise."""
    bits = (upper.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)
    return bits.view(torch.float32)


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 and int16 remainder of float32 `values`; `join` returns exactly `values`."""
    bits = values.contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16
    remainder = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)
