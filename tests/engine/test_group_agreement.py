"""Ranks whose hyper-parameters differ don't train apart: the step ends in an error that names them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Batch, square_loss
from tests.support.zoo import Stack
from zeroshard.engine.build import build_handle
from zeroshard.engine.outside_step.gathered import mark_parameters
from zeroshard.engine.planning import make_plan
from zeroshard.engine.step.device_stepper import DeviceStepper
from zeroshard.engine.step.regions_of import make_regions
from zeroshard.errors import DivergenceError
from zeroshard.optim.adam.device_adam import DeviceAdam
from zeroshard.optim.clients import torch_source
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.rules import ADAMW

CPU = torch.device("cpu")


def _groups(model: torch.nn.Module, rank: int, kind: str) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    moved = "outer.bias" if kind == "members" and rank == 1 else ""
    first = [p for name, p in named if name.endswith("weight") or name == moved]
    second = [p for name, p in named if name.endswith("bias") and name != moved]
    return [{"params": first, "weight_decay": 0.1}, {"params": second}]


def _step_apart(rank: int, world: int, kind: str, on_device: bool) -> tuple[str, float]:
    torch.manual_seed(0)
    model = Stack(2)
    client = torch.optim.AdamW(_groups(model, rank, kind), lr=1e-3)
    if on_device:
        source = torch_source(client, allow_untested=False)
        handle = build_handle(model, make_plan(model, 3, source, CPU), device=CPU)
        mark_parameters(handle)
        stepper = DeviceStepper(handle, DeviceAdam(ADAMW, make_regions(handle, source.groups), CPU), None)
        optimizer = ShardedOptimizer(source.groups, source.defaults, stepper, "AdamW")
    else:
        optimizer = zeroshard.shard(model, client, plan=2)[1]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    start = time.monotonic()
    for step in range(4):
        if step == 2 and rank == 1 and kind != "members":
            optimizer.param_groups[1][kind] = 0.25
        before = [] if on_device else [parameter.detach().clone() for parameter in model.parameters()]
        square_loss(model, Batch(step, 0, rank)).backward()
        try:
            optimizer.step()
        except DivergenceError as error:
            values = () if on_device else tuple(model.parameters())
            assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True)), "nothing is updated"
            return str(error), time.monotonic() - start
        schedule.step()
    return "trained", time.monotonic() - start


@pytest.mark.parametrize(
    ("kind", "on_device", "words"),
    [
        ("lr", False, ("rank 0 with group 1", "lr=0.00025", "rank 1 with group 1", "lr=0.25")),
        (
            "weight_decay",
            True,
            ("rank 0 with group 1", "weight_decay=0.01", "rank 1 with group 1", "weight_decay=0.25"),
        ),
        ("members", False, ("rank 0 with group 0 (6 parameters", "rank 1 with group 0 (7 parameters")),
    ],
)
def test_a_rank_with_other_groups_is_named(kind: str, on_device: bool, words: tuple[str, ...]) -> None:
    for text, seconds in run_ranks(2, _step_apart, kind, on_device):
        assert "ranks stepped with different optimizer groups" in text
        assert all(word in text for word in words), text
        assert "group 0" not in text or kind == "members", "what is equal is not shown"
        assert "Hyper-parameters must be the same on all ranks" in text
        assert seconds < 10
