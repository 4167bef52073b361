"""A wire of bfloat16: parameters are gathered as if bfloat16 values were codes, without scales.

Nothing of the package knows it. `Bf16Blocks` says how many bytes such codes take, from which the plan's memory and
traffic follow; `encode` and `decode` are what the legs ENCODE and DECODE of a gather run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from zeroshard.engine.core import gather_steps
from zeroshard.plan.placement import Blocks


class Bf16Blocks(Blocks):
    """Codes of 16 bits without scales."""

    def __init__(self) -> None:
        object.__setattr__(self, "bits", 16)
        object.__setattr__(self, "size", 8)

    def scale_nbytes(self, numel: int) -> int:
        return 0


def encode(values: torch.Tensor, record: torch.Tensor, blocks: Blocks) -> None:
    """Write flat values into the record of this rank (uint8, two bytes per value)."""
    assert isinstance(blocks, Bf16Blocks)
    record.view(torch.bfloat16).copy_(values)


def decode(records: torch.Tensor, ranks: int, values: torch.Tensor, blocks: Blocks, *, add: bool) -> None:
    """Read the records of all ranks, one after the other, into the flat values."""
    assert isinstance(blocks, Bf16Blocks)
    assert not add
    values.copy_(records.view(torch.bfloat16))


@contextmanager
def bf16_wire() -> Iterator[None]:
    """Let gathers in codes run these two functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_steps, "encode", encode)
        patch.setattr(gather_steps, "decode", decode)
        yield
