"""Codes of 8 bits are those that torchao makes of the same values, also at the borders between two codes."""

from __future__ import annotations

import pytest
import torch

from tests.support.beside import needs_torchao, use_beside
from tests.support.distributed import run_ranks
from zeroshard.optim.adam.blocks import encode_8_bits, half_gaps, require_torchao

SIZE = 256


def _values(table: torch.Tensor, signed: bool) -> torch.Tensor:
    """Values in blocks of every kind: of many magnitudes, the table's own, those half-way and beside, zeros, NaN."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(64 * SIZE, generator=generator) * 10 ** torch.randint(
        -30, 20, (64 * SIZE,), generator=generator
    )
    near = torch.randn(64 * SIZE, generator=generator)
    between = table + half_gaps(table)
    infinity = torch.full_like(between, float("inf"))
    borders = [table, between, torch.nextafter(between, infinity), torch.nextafter(between, -infinity)]
    blocks = [spread, near, *(block.clamp(-1, 1).scatter(0, torch.tensor([255]), 1.0) for block in borders)]
    blocks += [torch.zeros(SIZE), torch.full((SIZE,), 1e-40), torch.full((SIZE,), float("nan"))]
    odd = torch.randn(SIZE, generator=generator)
    odd[7], odd[8] = float("nan"), float("inf")
    infinite = torch.randn(SIZE, generator=generator)
    infinite[3] = float("inf")
    values = torch.cat([*blocks, odd, infinite])
    return values if signed else values.abs()


def _compare(rank: int, world: int) -> None:
    use_beside()
    for signed in (True, False):
        kind = require_torchao(8, "AdamW8bit")
        table = kind.zeros((SIZE,), signed, SIZE, torch.device("cpu")).qmap
        values = _values(table, signed)
        expected = kind.zeros(values.shape, signed, SIZE, torch.device("cpu"))
        expected.copy_(values)
        codes, scale = torch.empty_like(values, dtype=torch.uint8), torch.empty(len(values) // SIZE)
        encode_8_bits(values, table, half_gaps(table), codes, scale)
        assert torch.equal(scale.view(torch.int32), expected.scale.view(torch.int32))
        wrong = (codes != expected.codes).nonzero().flatten()
        assert not len(wrong), (signed, wrong[:5], codes[wrong[:5]], expected.codes[wrong[:5]])
        assert len(codes.unique()) > 250


@needs_torchao
@pytest.mark.parametrize("world", [1])
def test_codes_of_8_bits_are_those_of_torchao(world: int) -> None:
    run_ranks(world, _compare)
