"""Where sharding is refused, nothing of it is left behind, and the model can be sharded by another call."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Batch, square_loss
from tests.support.training import adamw, full_parameters
from tests.support.zoo import Stack
from zeroshard.errors import PlanError, UsageError
from zeroshard.plan.builder import Recipe
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import STAGES


@dataclass(frozen=True)
class _Held:
    """What this process holds of the system."""

    threads: int
    native_threads: int
    files: int

    @staticmethod
    def now() -> _Held:
        """At this moment, without what nobody reaches any more."""
        gc.collect()
        tasks, files = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
        return _Held(threading.active_count(), len(tasks), len(files))


def _refused(rank: int, world: int) -> None:
    model = Stack()
    expected = full_parameters(zeroshard.shard(model, plan=0)[0])
    zeroshard.close(model)
    before = _Held.now()
    without_update = Recipe(sharding=STAGES[3], offload=Offload())
    beyond_the_gpu = Recipe(sharding=STAGES[3], peer_copies=True)
    for plan, make, why in (
        (without_update, torch.optim.Adamax, "Adamax can't update state in host memory"),
        (beyond_the_gpu, torch.optim.AdamW, "peer_copies needs GPUs"),
    ):
        with pytest.raises(PlanError, match=why):
            zeroshard.shard(model, make(model.parameters()), plan=plan)
        assert _Held.now() == before
    model, optimizer = zeroshard.shard(model, adamw(model), plan=3)
    assert optimizer is not None
    values = full_parameters(model)
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    square_loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()
    zeroshard.close(model)


def test_a_plan_that_is_refused_leaves_a_model_that_another_can_shard() -> None:
    run_ranks(2, _refused)


def test_initialize_that_ends_in_an_error_leaves_a_model_that_the_next_call_takes() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    model = Stack()
    faults: dict[str, dict[str, Any]] = {
        "lr_scheduler is a int": {"lr_scheduler": lambda optimizer: 5},
        "a dataset with a length": {"training_data": 5},
    }
    for why, wrong in faults.items():
        with pytest.raises(UsageError, match=why):
            zeroshard.initialize(model=model, config=config, **wrong)
    zeroshard.initialize(model=model, config=config)[0].destroy()
