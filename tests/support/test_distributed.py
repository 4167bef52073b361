"""What tests may rely on when they run ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks


def _sum_of_ranks(rank: int, world_size: int, factor: float) -> tuple[float, int]:
    value = torch.tensor([float(rank + 1) * factor])
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads()


def _tensor(rank: int, world_size: int) -> torch.Tensor:
    return torch.full((3,), float(rank))


def _one_raises_others_wait(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("planted on rank one")
    dist.barrier()


def _one_is_killed(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _one_hangs(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        _sleep_long()


def _sleep_long() -> None:
    time.sleep(1000)


def _environment(rank: int, world_size: int) -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "PLANTED"))


def _imported_by_training(rank: int, world_size: int) -> set[str]:
    before = set(sys.modules)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    engine = zeroshard.initialize(model=nn.Linear(2, 2), config=config)[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    return {name for name in set(sys.modules) - before if name.startswith("zeroshard")}


def _gpus(rank: int, world_size: int) -> int:
    return torch.cuda.device_count()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    total = 2.0 * sum(range(1, world_size + 1))
    assert run_ranks(world_size, _sum_of_ranks, 2.0) == [(total, 1)] * world_size


def test_tensors_come_back() -> None:
    assert [result.tolist() for result in run_ranks(2, _tensor)] == [[0.0] * 3, [1.0] * 3]


def test_environment_is_torchruns_with_the_tests_on_top() -> None:
    assert run_ranks(2, _environment, env={"PLANTED": "yes"}) == [("0", "2", "yes"), ("1", "2", "yes")]


def test_a_rank_starts_with_the_package_in_memory_and_imports_no_more_of_it_to_train() -> None:
    assert run_ranks(2, _imported_by_training) == [set(), set()]


def test_a_rank_over_gloo_sees_no_gpu() -> None:
    assert run_ranks(1, _gpus) == [0]


def test_the_first_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 failed first:[\s\S]*planted on rank one[\s\S]*then rank 0"):
        run_ranks(2, _one_raises_others_wait)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 failed first:\ndied without a report: killed by SIGKILL"):
        run_ranks(2, _one_is_killed)


def test_a_hang_ends_at_the_timeout_with_the_stacks_of_every_rank() -> None:
    with pytest.raises(AssertionError, match=r"no result after 2 s\nrank 0 hung:[\s\S]*barrier[\s\S]*_sleep_long"):
        run_ranks(2, _one_hangs, timeout=2)
    assert multiprocessing.active_children() == []


def test_a_local_function_is_refused() -> None:
    with pytest.raises(AssertionError, match="module-level function"):
        run_ranks(1, lambda rank, world_size: None)
