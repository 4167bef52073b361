"""A trace with products in fp8 counts what kernels do: products at fp8's rate, casts, and inputs kept in one byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zeroshard.fp8.convert import convert
from zeroshard.fp8.recipe import Products, Scaling
from zeroshard.planner.trace.kernels import KernelKind
from zeroshard.planner.trace.ledger import Purpose
from zeroshard.planner.trace.model_trace import Phase, Trace, trace
from zeroshard.sharding.units import find_units

WIDTH, ROWS, BLOCKS = 256, 512, 3
LAYERS = tuple(f"{block}.{index}" for block in range(BLOCKS) for index in (1, 3))


def _traced(products: Products | None) -> Trace:
    blocks = (
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(BLOCKS)
    )
    model = nn.Sequential(*blocks).to("meta", torch.bfloat16)
    if products is not None:
        convert(model, products)
    batch = torch.empty(ROWS, WIDTH, device="meta", dtype=torch.bfloat16)
    return trace(model, find_units(model), (batch,), {}, loss=lambda output: output.float().square().mean(), tokens=1)


def _kept(traced: Trace) -> int:
    """Bytes of activations at the end of the forward."""
    return [segment for segment in traced.segments if segment.phase is Phase.FORWARD][-1].end[Purpose.ACTIVATIONS]


def _moved(traced: Trace) -> int:
    """Bytes that kernels beside products read and write."""
    kernels = (item for segment in traced.segments for item in segment.kernels.items())
    return sum(kernel.nbytes * times for kernel, times in kernels if kernel.kind is KernelKind.ELEMENTWISE)


@pytest.mark.parametrize("scaling", Scaling)
def test_products_are_in_fp8_and_inputs_are_kept_in_one_byte(scaling: Scaling) -> None:
    plain, found = _traced(None), _traced(Products(scaling, LAYERS))
    kernels = [item for segment in found.segments for item in segment.kernels.items()]
    products = [(kernel, times) for kernel, times in kernels if kernel.kind is KernelKind.GEMM]
    assert sum(times for _, times in products) == 3 * len(LAYERS)
    assert {kernel.dtype.itemsize for kernel, _ in products} == {1}
    if scaling.rests:  # of the input of a block's second layer GELU keeps what it was made of
        assert _kept(found) < _kept(plain) - BLOCKS * ROWS * 4 * WIDTH * 0.85
    else:
        assert _kept(found) == pytest.approx(_kept(plain), rel=0.01)


def test_casts_by_block_read_values_once() -> None:
    by_tensor, by_block = (_traced(Products(scaling, LAYERS)) for scaling in (Scaling.TENSORWISE, Scaling.BLOCKWISE))
    values = BLOCKS * 2 * ROWS * (WIDTH + 4 * WIDTH)  # inputs and gradients of both layers of a block
    assert _moved(by_tensor) - _moved(by_block) == pytest.approx(2 * values, rel=0.05)


def test_a_weight_that_rests_in_fp8_is_not_cast() -> None:
    rests, cast = (_traced(Products(Scaling.TENSORWISE, LAYERS, resting=resting)) for resting in (True, False))
    weights = BLOCKS * 2 * 4 * WIDTH * WIDTH
    assert _moved(cast) - _moved(rests) == pytest.approx(5 * weights, rel=0.01)  # two reads in bf16, and codes written
