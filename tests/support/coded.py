"""Everything that codes can be asked for, in one run: of the processor's code, torch's operations, and kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from zeroshard.engine.memory import block_codes
from zeroshard.plan.hops import Feedback
from zeroshard.plan.placement import Blocks

RANKS, BLOCKS = 3, 6
Found = list[torch.Tensor]
Decode = Callable[..., Any]


def _values(dtype: torch.dtype, blocks: Blocks) -> torch.Tensor:
    values = torch.randn(RANKS * BLOCKS, blocks.size, generator=torch.Generator().manual_seed(0))
    values *= 10.0 ** torch.arange(-9, 9)[:, None]
    values[3], values[4] = 0.0, 1e-42
    values[5] = torch.arange(blocks.size) % 15 - 7.5  # halves between two codes
    values[6, 3], values[7, 5] = float("nan"), float("-inf")
    return values.view(-1).to(dtype)


def through_codes(
    dtype: torch.dtype, blocks: Blocks, device: str = "cpu", *, error_dtype: torch.dtype = torch.bfloat16
) -> Found:
    """What comes out of every way of using codes, twice in a row with an error that is kept; on the CPU."""
    values, found = _values(dtype, blocks).to(device), Found()
    nbytes = blocks.code_nbytes(values.numel()) + blocks.scale_nbytes(values.numel())
    records = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    error = torch.zeros(values.numel(), dtype=error_dtype, device=device)
    for kept, add in product((None, error, error), (False, True)):
        feedback = None if kept is None else Feedback()
        block_codes.encode(values, records, blocks, ranks=RANKS, error=kept, feedback=feedback)
        whole = torch.linspace(-1, 1, values.numel()).to(device, dtype)
        block_codes.decode(records, RANKS, whole, blocks, add=add)
        part = torch.linspace(-1, 1, values.numel() // RANKS).to(device, dtype)
        block_codes.decode_sum(records, RANKS, part, blocks, add=add)
        found += [tensor.cpu().clone() for tensor in (whole, part, error)]
    return found


def assert_same_codes(one: Found, other: Found) -> None:
    """Bit for bit, but for the payload of NaN."""
    for first, second in zip(one, other, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
