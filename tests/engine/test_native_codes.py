"""Codes that native code makes and reads on the processor have the bits of torch's operations."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from zeroshard.engine.memory import native_codes
from zeroshard.engine.memory.block_codes import decode, decode_sum, encode
from zeroshard.plan.hops import BETWEEN, WITHIN, Feedback
from zeroshard.plan.placement import Blocks

RANKS, BLOCKS = 3, 6
Found = list[torch.Tensor]


def _values(dtype: torch.dtype, blocks: Blocks) -> torch.Tensor:
    values = torch.randn(RANKS * BLOCKS, blocks.size, generator=torch.Generator().manual_seed(0))
    values *= 10.0 ** torch.arange(-9, 9)[:, None]
    values[3], values[4] = 0.0, 1e-42
    values[5] = torch.arange(blocks.size) % 15 - 7.5  # halves between two codes
    values[6, 3], values[7, 5] = float("nan"), float("-inf")
    return values.view(-1).to(dtype)


def _through(dtype: torch.dtype, blocks: Blocks) -> Found:
    """What comes out of every way of using codes, twice in a row with an error that is kept."""
    values, found = _values(dtype, blocks), list[torch.Tensor]()
    nbytes = blocks.code_nbytes(values.numel()) + blocks.scale_nbytes(values.numel())
    records, error = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(values.numel(), dtype=torch.bfloat16)
    for kept, add in product((None, error, error), (False, True)):
        encode(values, records, blocks, ranks=RANKS, error=kept, feedback=None if kept is None else Feedback())
        whole = torch.linspace(-1, 1, values.numel()).to(dtype)
        decode(records, RANKS, whole, blocks, add=add)
        part = torch.linspace(-1, 1, values.numel() // RANKS).to(dtype)
        decode_sum(records, RANKS, part, blocks, add=add)
        found += [whole, part, error.clone()]
    return found


@pytest.mark.skipif(native_codes.load_library() is None, reason="no C++ compiler was there at installation")
def test_native_code_and_torch_give_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, blocks in product((torch.float32, torch.bfloat16), (WITHIN, BETWEEN, Blocks(4, 64))):
        native = _through(dtype, blocks)
        with monkeypatch.context() as patched:
            patched.setattr(native_codes, "load_library", lambda: None)
            torch_s = _through(dtype, blocks)
        for one, other in zip(native, torch_s, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
