"""Products in fp8 on a GPU: the codes have a processor's bits, stages, graphs and checkpointing each other's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.gpu.test_training import BACKEND, GPUS
from tests.support.distributed import run_ranks
from tests.support.fp8_model import (
    BY_BLOCK,
    FP8,
    adamw,
    batch,
    build,
    codes_are_those_of_whole_weights,
    loss_of,
    recipe,
)
from zeroshard.errors import PlanError
from zeroshard.fp8.block_casts import cast_blocks, cast_tiles, cast_tiles_both
from zeroshard.fp8.cast import FORMATS, VALUES, cast, cast_both, cast_columns, cast_rows, decode, transpose
from zeroshard.fp8.products import check_device, product_of_blocks
from zeroshard.fp8.recipe import Fp8, Scaling

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


def _runs(scaling: Scaling) -> bool:
    """Whether the first GPU and torch have products with such scales."""
    try:
        check_device(torch.device("cuda", 0), scaling)
    except PlanError:
        return False
    return True


def _needs_blocks() -> None:
    if not _runs(Scaling.BLOCKWISE):
        pytest.skip("needs a GPU and a torch that multiply with scales by block")


def _bytes(results: Any) -> list[torch.Tensor]:
    if isinstance(results, tuple):
        return [tensor for one in results for tensor in _bytes(one)]
    return [results.float().nan_to_num(9.0).cpu()]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(5, 32), (100, 48), (257, 4096)])
def test_a_gpu_casts_to_the_bits_of_a_processor(rows: int, columns: int, kind: torch.dtype) -> None:
    values = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 9).bfloat16()
    values[0, :6] = torch.tensor([0.0, 448.0, -3e5, 1e-30, math.inf, math.nan])
    for clean in (values, values.nan_to_num(7.0, 7.0, 7.0)):
        for how in (cast, cast_both, cast_rows, cast_columns):
            compiled: Any = torch.compile(how, fullgraph=True)
            expected = _bytes(how(clean, kind))
            for found in (how(clean.cuda(), kind), compiled(clean.cuda(), kind)):
                assert all(map(torch.equal, _bytes(found), expected)), how
    codes, _ = cast(values, kind)
    assert all(map(torch.equal, _bytes(transpose(codes.cuda())), _bytes(transpose(codes))))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(5, 128), (130, 384), (256, 4096)])
def test_a_gpu_casts_tiles_and_blocks_to_the_bits_of_a_processor(rows: int, columns: int, kind: torch.dtype) -> None:
    values = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 9).bfloat16()
    values[0, :6] = torch.tensor([0.0, 448.0, -3e5, 1e-30, math.inf, math.nan])
    for clean in (values, values.nan_to_num(7.0, 7.0, 7.0)):
        for how in (cast_tiles, cast_tiles_both, *(() if rows % 128 else (cast_blocks,))):
            compiled: Any = torch.compile(how, fullgraph=True)
            expected = _bytes(how(clean, kind))
            for found in (how(clean.cuda(), kind), compiled(clean.cuda(), kind)):
                assert all(map(torch.equal, _bytes(found), expected)), how


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(256, 128, 128), (256, 512, 384), (64, 384, 256), (5, 896, 128), (4096, 2048, 5632)]
)
def test_products_by_block_are_those_of_the_decoded_values(rows: int, inner: int, columns: int) -> None:
    _needs_blocks()
    generator = torch.Generator().manual_seed(4)
    spread = torch.logspace(-2, 2, inner)
    a = (torch.randn(rows, inner, generator=generator) * spread).bfloat16().cuda()
    b = (torch.randn(columns, inner, generator=generator) * spread.flip(0)).bfloat16().cuda()
    left, compiled = cast_tiles(a, VALUES), torch.compile(product_of_blocks, fullgraph=True)
    for right in (cast_blocks(b, VALUES), cast_tiles(b, VALUES)):
        expected = decode(*left, torch.float64) @ decode(*right, torch.float64).t()
        for multiply in (product_of_blocks, compiled):
            found = multiply(*left, *right, torch.bfloat16)
            assert found.shape == (rows, columns)
            assert float((found - expected).norm() / expected.norm()) < 4e-3, multiply


def _train(
    rank: int, stage: int, *, fp8: Fp8, graphed: bool = False, compiled: bool = False, recomputed: bool = False
) -> Any:
    model: nn.Module = build(fp8)
    if recomputed:
        zeroshard.checkpoint_activations(model)
    if compiled:
        for block in model.get_submodule("blocks").children():
            block.forward = torch.compile(block.forward, fullgraph=True)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(stage, fp8=fp8))
    assert optimizer is not None

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step: Any = zeroshard.GraphedStep(model, train) if graphed else train
    losses = [float(step(batch(number, 0, rank).cuda())) for number in range(8)]
    weights = dict(zeroshard.iterate_full_parameters(model))
    codes_are_those_of_whole_weights(model, weights)
    zeroshard.close(model)
    return losses, weights


def _all(rank: int, world: int, fp8: Fp8) -> None:
    torch.cuda.set_device(rank)
    losses, weights = _train(rank, 3, fp8=fp8)
    ways: tuple[dict[str, Any], ...] = ({"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3, "recomputed": True})
    for way in (*ways, {"stage": 3, "graphed": True}, {"stage": 2, "graphed": True}):
        other_losses, other = _train(rank, **way, fp8=fp8)
        assert other_losses == losses, way
        assert all(torch.equal(other[name], value) for name, value in weights.items()), way
    close, _ = _train(rank, 3, compiled=True, fp8=fp8)
    assert close == pytest.approx(losses, rel=0.05)


@pytest.mark.parametrize("fp8", [FP8, BY_BLOCK], ids=["by tensor", "by block"])
@pytest.mark.parametrize("world", [1, 2])
def test_stages_graphs_and_recomputed_blocks_have_the_same_bits(world: int, fp8: Fp8) -> None:
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    if fp8 is BY_BLOCK:
        _needs_blocks()
    run_ranks(world, _all, fp8, backend=BACKEND)


def _beside_bf16(rank: int, world: int, fp8: Fp8 | None) -> list[float]:
    torch.cuda.set_device(rank)
    model: nn.Module = build(BY_BLOCK)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(3, fp8=fp8))
    assert optimizer is not None
    losses: list[float] = []
    for step in range(20):
        loss = loss_of(model, batch(step, 0, rank, rows=256).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    zeroshard.close(model)
    return losses


def test_a_model_with_scales_by_block_trains_close_to_bf16() -> None:
    _needs_blocks()
    ours, theirs = (run_ranks(1, _beside_bf16, fp8, backend=BACKEND)[0] for fp8 in (BY_BLOCK, None))
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=0.03)
    assert ours[-1] < ours[0]
