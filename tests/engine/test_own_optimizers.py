"""Optimizers that torch lacks, or that see whole parameters: sharded they equal plain unsharded ones, bit for bit.

Only two batches have a gradient that is not zero. A sum of two numbers and zeros does not depend on the order, so nothing
may differ at any world size, although Muon would blow the slightest difference up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, held_bytes, sent
from tests.support.models import WIDTH, Batch, Task
from tests.support.references import PlainLamb, PlainLion, PlainMuon
from tests.support.training import Setting, assert_close, assert_same, build, full_parameters, train_reference, train_sharded
from zeroshard.engine.build import build_handle
from zeroshard.engine.device_stepper import DeviceStepper
from zeroshard.engine.gathered import mark_parameters
from zeroshard.engine.handle import handle_of
from zeroshard.engine.native import make_plan, make_site
from zeroshard.errors import PlanError, UsageError
from zeroshard.optim.clients import client_source
from zeroshard.optim.lamb import LambUpdate
from zeroshard.optim.loss_scale import LossScaler
from zeroshard.optim.muon_source import device_update
from zeroshard.optim.newton_schulz import orthogonalize
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import ExecutionPolicy, OnNonFinite, Plan
from zeroshard.plan.traffic import step_traffic

Make = Callable[[nn.Module], torch.optim.Optimizer]


class _Block(nn.Module):
    """A wide and a tall matrix, a stack of matrices, a convolution's weight, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, 5) * 0.1)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.kernel = nn.Parameter(torch.randn(4, 2, 2, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        x = x + (x @ self.experts).sum(0).sum(-1, keepdim=True) + self.kernel.sum() * self.kernel.std()
        return self.conv(x[:, None])[:, 0]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, 7)
        self.blocks[1].up.requires_grad_(False)

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        x = self.inp(x)
        for index in used:
            x = self.blocks[index](x)
        return self.lm_head(x)


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Block 2 has no gradient in step 1."""
    return model(batch.normal(3, WIDTH), (0, 1) if batch.step == 1 else (0, 1, 2)).float().square().mean()


def _two_ranks(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Ranks from 2 on have gradients that are zero."""
    return _loss(model, batch) * (1.0 if batch.rank < 2 else 0.0)


def _two_batches(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Of all micro-batches of all ranks only two have gradients that are not zero."""
    return _loss(model, batch) * (1.0 if batch.rank == batch.micro else 0.0)


CASES = (
    (Task(_Model, _two_ranks), Setting(steps=4)),
    (Task(_Model, _two_batches), Setting(steps=3, micro=2, clip=0.5)),
)


def _two_groups(model: nn.Module, **second: Any) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() <= 1], **second},
    ]


def _muon_groups(model: nn.Module, **matrix: Any) -> list[dict[str, Any]]:
    """Two groups of matrices with other rates, and the rest."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [(name, p) for name, p in named if p.dim() > 1 and "lm_head" not in name]
    chosen = {id(p) for _, p in hidden}
    common = {"momentum": 0.9, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1, "adjust_lr_fn": None, **matrix}
    first = [p for name, p in hidden if "down" in name]
    second = [p for name, p in hidden if "down" not in name]
    return [
        {"params": first, "use_muon": True, "lr": 0.02, **common},
        {"params": [p for _, p in named if id(p) not in chosen], "use_muon": False, **ADAM},
        {"params": second, "use_muon": True, "lr": 0.01, **common},
    ]


ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01}
LION: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
LAMB: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
BOUNDS = {"eps_inside_sqrt": False, "bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01}
OTHER_BOUNDS = {"eps_inside_sqrt": True, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.1}

PAIRS: dict[str, tuple[Make, Make]] = {
    "Lion": (
        lambda m: zeroshard.Lion(_two_groups(m, weight_decay=0.0, lr=5e-4), **LION),
        lambda m: PlainLion(_two_groups(m, weight_decay=0.0, lr=5e-4), **LION),
    ),
    "Lamb": (
        lambda m: zeroshard.Lamb(_two_groups(m, weight_decay=0.0, max_coeff=1.0), **LAMB, **BOUNDS),
        lambda m: PlainLamb(_two_groups(m, weight_decay=0.0, max_coeff=1.0), **LAMB, **BOUNDS),
    ),
    "Lamb bounded": (
        lambda m: zeroshard.Lamb(_two_groups(m, lr=0.02), **LAMB, **OTHER_BOUNDS),
        lambda m: PlainLamb(_two_groups(m, lr=0.02), **LAMB, **OTHER_BOUNDS),
    ),
    "Muon": (lambda m: zeroshard.MuonAdamW(_muon_groups(m)), lambda m: PlainMuon(_muon_groups(m))),
    "Muon as AdamW": (
        lambda m: zeroshard.MuonAdamW(_muon_groups(m, adjust_lr_fn="match_rms_adamw", nesterov=False)),
        lambda m: PlainMuon(_muon_groups(m, adjust_lr_fn="match_rms_adamw", nesterov=False)),
    ),
}


def _equal(rank: int, world: int, stages: tuple[int, ...]) -> int:
    checked = 0
    for name, (ours, plain) in PAIRS.items():
        for task, setting in CASES:
            reference = train_reference(task, replace(setting, optimizer=plain), world, rank)
            for stage in stages:
                outcome = train_sharded(task, replace(setting, optimizer=ours, plan=stage), rank)
                what = f"{name}, stage {stage}, micro {setting.micro}"
                if "Lamb" in name:  # its norms are sums, whose order depends on the sharding
                    assert_close(outcome.parameters, reference.parameters, 5e-7, what)
                else:
                    assert_same(outcome.parameters, reference.parameters, what)
                checked += 1
    return checked


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_equals_its_unsharded_reference_bit_for_bit(world: int) -> None:
    stages = (0, 1, 2, 3) if world == 2 else (0, 3) if world == 1 else (1, 3) if world == 3 else (2,)
    assert run_ranks(world, _equal, stages) == [len(PAIRS) * 2 * len(stages)] * world
