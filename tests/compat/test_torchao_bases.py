"""Frozen bases of torchao in 4 bits, at stages 0 to 3 beside one process: `ZEROSHARD_HF_TESTS=1`.

NF4Tensor           decodes in forward and backward: adapters may lie anywhere
Int4OpaqueTensor    its kernel has no backward, in torchao itself: what is trained lies above it
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.distributed import run_ranks
from tests.support.installed import need
from zeroshard.sharding.resting import is_resting
from zeroshard.sharding.unpack import parameters_of

need("torchao")
pytestmark = pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")

WIDTH, STEPS = 256, 4


def _nf4(weight: torch.Tensor) -> torch.Tensor:
    workflows = importlib.import_module("torchao.quantization.quantize_.workflows")
    return workflows.to_nf4(weight, block_size=64, scaler_block_size=256)


def _int4(weight: torch.Tensor) -> torch.Tensor:
    int4 = importlib.import_module("torchao.prototype.quantization.int4")
    return int4.Int4OpaqueTensor.from_hp(weight, [1, 32])


class Adapted(nn.Module):
    """A frozen layer and a trained one of low rank beside it."""

    def __init__(self, quantize: Callable[[torch.Tensor], torch.Tensor], *, trained: bool) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.weight = nn.Parameter(quantize(self.base.weight.detach()), requires_grad=False)
        self.down = nn.Linear(WIDTH, 8, bias=False) if trained else None
        self.up = nn.Linear(8, WIDTH, bias=False) if trained else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return y if self.down is None or self.up is None else torch.tanh(y + self.up(self.down(x)))


def _stack(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "nf4":
        return nn.Sequential(*(Adapted(_nf4, trained=True) for _ in range(3)))
    return nn.Sequential(*(Adapted(_int4, trained=False) for _ in range(2)), nn.Linear(WIDTH, WIDTH))


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, target = torch.randn(2, 6, WIDTH, generator=generator)
    return x, target


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    x, target = _batch(step, rank)
    return (model(x) - target).square().mean()


def _alone(name: str, world: int) -> list[float]:
    """Losses of rank 0's batches in one process that sees all batches."""
    model = _stack(name)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses: list[float] = []
    for step in range(STEPS):
        found = [_loss(model, step, rank) for rank in range(world)]
        torch.stack(found).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found[0].detach()))
    return losses


def _trains(rank: int, world: int, name: str) -> None:
    import zeroshard

    warnings.simplefilter("ignore")
    expected = _alone(name, world)
    assert len(set(expected)) == STEPS
    for stage, early in ((0, False), (1, False), (2, False), (3, False), (3, True)):
        model = _made(name, early=early)
        engine, *_ = zeroshard.initialize(model=model, config=_config(stage))
        losses: list[float] = []
        for step in range(STEPS):
            loss = _loss(engine, step, rank)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        assert rank or losses == pytest.approx(expected, rel=1e-6), (stage, early)
        engine.destroy()


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def _made(name: str, *, early: bool) -> nn.Module:
    """The model, sharded while it is made if that is asked for."""
    import zeroshard

    if not early:
        return _stack(name)
    with zeroshard.QuantizedInit():
        model = _stack(name)
    weight = model[0].base.weight  # pyright: ignore[reportIndexIssue, reportAttributeAccessIssue]
    assert any(is_resting(part) for part in parameters_of(weight))
    return model


@pytest.mark.parametrize("name", ["nf4", "int4"])
def test_a_base_in_4_bits_of_torchao_trains_as_in_one_process(name: str) -> None:
    run_ranks(2, _trains, name, timeout=300)
