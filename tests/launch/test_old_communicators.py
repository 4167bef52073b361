"""Communicators of a round that has ended: an operation that a lost rank never answers does not keep the others."""

from __future__ import annotations

import gc
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from zeroshard.elastic.run import drop_in_background


def _silent(rank: int, world: int) -> float:
    """Seconds until rank 0 is free, while rank 1 says nothing for ten."""
    group = dist.new_group(timeout=timedelta(seconds=120))
    assert group is not None
    dist.all_reduce(torch.ones(4), group=group)
    began = time.monotonic()
    if rank == 1:
        time.sleep(10)
    else:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        time.sleep(0.5)  # a thread of gloo's is waiting for the other rank by now
        del work
        communicators = [group]
        del group
        dist.destroy_process_group()
        drop_in_background(communicators)
        assert not communicators
        gc.collect()
    return time.monotonic() - began


def test_the_next_round_does_not_wait_for_them() -> None:
    free, _ = run_ranks(2, _silent, timeout=60)
    assert free < 8
