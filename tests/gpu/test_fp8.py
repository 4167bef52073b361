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
from tests.support.fp8_model import adamw, batch, build, codes_are_those_of_whole_weights, loss_of, recipe
from zeroshard.fp8.cast import FORMATS, cast, cast_both, cast_columns, cast_rows, transpose

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


def _bytes(results: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    found = results if isinstance(results, tuple) else (results,)
    return [one.float().nan_to_num(9.0).cpu() for one in found]


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


def _train(rank: int, stage: int, *, graphed: bool = False, compiled: bool = False, recomputed: bool = False) -> Any:
    model: nn.Module = build()
    if recomputed:
        zeroshard.checkpoint_activations(model)
    if compiled:
        for block in model.get_submodule("blocks").children():
            block.forward = torch.compile(block.forward, fullgraph=True)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), plan=recipe(stage))
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


def _all(rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    losses, weights = _train(rank, 3)
    ways: tuple[dict[str, Any], ...] = ({"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3, "recomputed": True})
    for way in (*ways, {"stage": 3, "graphed": True}, {"stage": 2, "graphed": True}):
        other_losses, other = _train(rank, **way)
        assert other_losses == losses, way
        assert all(torch.equal(other[name], value) for name, value in weights.items()), way
    close, _ = _train(rank, 3, compiled=True)
    assert close == pytest.approx(losses, rel=0.05)


@pytest.mark.parametrize("world", [1, 2])
def test_stages_graphs_and_recomputed_blocks_have_the_same_bits(world: int) -> None:
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    run_ranks(world, _all, backend=BACKEND)
