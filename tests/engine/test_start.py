"""Sharding begins with rank 0's values on all ranks; where it is refused, nothing of it is left behind."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Batch, square_loss
from tests.support.training import adamw, full_parameters
from tests.support.zoo import Stack
from zeroshard.errors import PlanError, UsageError
from zeroshard.plan.builder import Recipe
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import STAGES

DTYPES = (torch.bool, torch.int16, torch.uint16, torch.int64, torch.float16, torch.float8_e4m3fn, torch.complex64)


class _Buffers(nn.Module):
    """Buffers of dtypes that gloo sends and does not send; some without dims, some of expanded memory."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(name, torch.tensor([1, number, 3]).to(dtype))
            self.register_buffer(f"{name}_scalar", torch.tensor(number).to(dtype))
        self.register_buffer("expanded", torch.tensor([float(number)]).expand(3))


def _starts(rank: int, world: int) -> None:
    model, expected = _Buffers(rank), dict(_Buffers(0).named_buffers())
    zeroshard.shard(model, plan=3)
    for name, buffer in model.named_buffers():
        assert buffer.dtype == expected[name].dtype
        assert buffer.tolist() == expected[name].tolist(), name


def test_buffers_of_every_dtype_are_those_of_rank_0() -> None:
    run_ranks(2, _starts)


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
