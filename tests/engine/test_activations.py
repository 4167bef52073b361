"""Checkpointed blocks train as plain ones, compute each block twice, and keep nothing else for the backward."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import saved_numel
from tests.support.models import Batch, Task, square_loss
from tests.support.training import Setting, adamw, assert_same, build, full_parameters, train_sharded
from tests.support.zoo import Stack
from zeroshard.errors import PlanError, UsageError

TASK = Task(Stack, square_loss)


def _keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "every second": {"every": 2},
    "on the host": {"on_host": True},
    "reentrant": {"use_reentrant": True},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)},
}


def _alike(rank: int, world: int) -> None:
    for stage in (1, 3):
        setting = Setting(plan=stage, steps=3)
        expected = train_sharded(TASK, setting, rank).parameters
        for name, options in OPTIONS.items():
            for before in (True, False):
                model = build(TASK)
                if before:
                    zeroshard.checkpoint_activations(model, **options)
                model, optimizer = zeroshard.shard(model, adamw(model), plan=stage)
                if not before:
                    zeroshard.checkpoint_activations(model, **options)
                for step in range(setting.steps):
                    TASK.loss(model, Batch(step, 0, rank)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert_same(full_parameters(model), expected, f"stage {stage}, {name}, before shard: {before}")
                zeroshard.close(model)


def test_it_trains_as_without_at_any_time_and_of_any_kind() -> None:
    run_ranks(2, _alike)


def _runs(model: nn.Module, names: list[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name in names:
        first = next(module for path, module in model.get_submodule(name).named_modules() if path)
        first.register_forward_hook(lambda *_, name=name: counts.update([name]))
    model(torch.randn(2, 8)).square().mean().backward()
    return counts


def test_chosen_blocks_run_twice_and_the_others_once() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    chosen = zeroshard.checkpoint_activations(model, every=2)
    assert chosen == ["0", "2"]
    assert _runs(model, ["0", "1", "2", "3"]) == {"0": 2, "1": 1, "2": 2, "3": 1}


def _loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 8, requires_grad=True)).square().mean()


def test_only_inputs_of_blocks_are_kept() -> None:
    def blocks() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4)))

    plain, checkpointed = blocks(), blocks()
    zeroshard.checkpoint_activations(checkpointed)
    kept, of = (saved_numel(lambda model=model: _loss(model)) for model in (checkpointed, plain))
    assert kept <= 5 * 4 * 8 < of / 8


def test_nothing_is_recomputed_without_gradients() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    before = model(torch.ones(1, 8))
    zeroshard.checkpoint_activations(model)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1, 8)), before)


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(PlanError, match="has no blocks"):
        zeroshard.checkpoint_activations(nn.Linear(4, 4))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    with pytest.raises(UsageError, match="every=0"):
        zeroshard.checkpoint_activations(model, every=0)
    with pytest.raises(UsageError, match="use_reentrant=False"):
        zeroshard.checkpoint_activations(model, use_reentrant=True, context_fn=OPTIONS["selective"]["context_fn"])
    zeroshard.checkpoint_activations(model)
    with pytest.raises(UsageError, match="'0' is checkpointed already"):
        zeroshard.checkpoint_activations(model)
