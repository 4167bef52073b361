"""What the wrapped collectives promise: right values, exact traffic, nothing sent at size 1."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.mesh import build_mesh
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.watchdog import Watchdog
from zeroshard.mesh import DATA


def _collectives(world_size: int, rank: int) -> tuple[Collectives, OperationLog, Watchdog]:
    mesh, log = build_mesh(), OperationLog()
    watchdog = Watchdog(mesh.store(), rank, world_size, log)
    return Collectives(mesh.over(DATA).gather, "dp", log, watchdog), log, watchdog


def _use_all(rank: int, world_size: int) -> tuple[dict[str, list[float]], dict[str, tuple[int, int]]]:
    comm, log, watchdog = _collectives(world_size, rank)
    values: dict[str, list[float]] = {}
    full = torch.zeros(2 * world_size)
    full[2 * rank : 2 * rank + 2] = rank + 1.0
    comm.wait(comm.all_gather(full, full[2 * rank : 2 * rank + 2], "u"))
    values["all-gather"] = full.tolist()
    full = torch.arange(2.0 * world_size) * (rank + 1)
    shard = full[2 * rank : 2 * rank + 2]
    comm.wait(comm.reduce_scatter(shard, full, "u"))
    values["in place"] = shard.tolist()
    apart = torch.empty(2, dtype=torch.bfloat16)
    comm.wait(comm.reduce_scatter(apart, torch.arange(2.0 * world_size).bfloat16(), "u"))
    values["apart"] = apart.tolist()
    total = torch.tensor([float(rank)])
    comm.wait(comm.all_reduce(total, "norm", dist.ReduceOp.MAX))
    values["all-reduce"] = total.tolist()
    sent = torch.tensor([float(rank), 5.0])
    comm.wait(comm.broadcast(sent, world_size - 1, "u"))
    values["broadcast"] = sent.tolist()
    watchdog.close()
    return values, log.totals()


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_and_traffic(world_size: int) -> None:
    for rank, (values, totals) in enumerate(run_ranks(world_size, _use_all)):
        factor = world_size * (world_size + 1) / 2
        assert values == {
            "all-gather": [r + 1.0 for r in range(world_size) for _ in range(2)],
            "in place": [2 * rank * factor, (2 * rank + 1) * factor],
            "apart": [2.0 * rank * world_size, (2.0 * rank + 1) * world_size],
            "all-reduce": [world_size - 1.0],
            "broadcast": [world_size - 1.0, 5.0],
        }
        n = 2 * world_size
        assert totals == {
            "all-gather": (1, 4 * n),
            "reduce-scatter": (2, 4 * n + 2 * n),
            "all-reduce": (1, 4),
            "broadcast": (1, 8),
        }


def _reduce_both_ways(rank: int, world_size: int) -> bool:
    comm, _, watchdog = _collectives(world_size, rank)
    generator = torch.Generator().manual_seed(rank)
    full = torch.randn(3 * 1001 * world_size, generator=generator)
    reduced = full.clone()
    comm.wait(comm.all_reduce(reduced, "u"))
    shard = full.view(world_size, -1)[rank]
    comm.wait(comm.reduce_scatter(shard, full, "u"))
    watchdog.close()
    return torch.equal(shard, reduced.view(world_size, -1)[rank])


def test_reduce_scatter_gives_the_bits_of_all_reduce() -> None:
    assert run_ranks(3, _reduce_both_ways) == [True] * 3


def _reduce_in_order(rank: int, world_size: int) -> None:
    torch.use_deterministic_algorithms(True)
    comm, log, watchdog = _collectives(world_size, rank)
    of_ranks = [
        torch.randn(1001 * world_size, generator=torch.Generator().manual_seed(one)) for one in range(world_size)
    ]
    for dtype in (torch.float32, torch.bfloat16):
        first, *others = (value.to(dtype).view(world_size, -1)[rank] for value in reversed(of_ranks))
        for other in others:
            first = first + other
        full = of_ranks[rank].to(dtype)
        shard = full.view(world_size, -1)[rank]
        comm.wait(comm.reduce_scatter(shard, full, "u"))
        assert torch.equal(shard, first)
    assert log.totals() == {"reduce-scatter": (2, 6 * 1001 * world_size)}
    watchdog.close()


def test_reduce_scatter_adds_up_from_the_last_rank_where_torch_is_to_be_deterministic() -> None:
    run_ranks(4, _reduce_in_order)


def test_a_single_rank_sends_and_logs_nothing() -> None:
    comm, log, watchdog = _collectives(1, 0)
    out, shard, full = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    for pending in (
        comm.all_gather(out, shard, "u"),
        comm.reduce_scatter(shard, full, "u"),
        comm.all_reduce(full, "u"),
        comm.broadcast(full, 0, "u"),
    ):
        assert pending.is_completed()
        comm.wait(pending)
    assert (out.tolist(), shard.tolist()) == ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    assert log.count == 0
    watchdog.close()


def _short_limit(rank: int, world_size: int) -> float:
    comm, _, watchdog = _collectives(world_size, rank)
    start = time.monotonic()
    if rank == 1:
        time.sleep(2.0)
    pending = comm.all_reduce(torch.ones(4), "late")
    if rank == 0:
        while not pending.finish_within(timedelta(microseconds=500)):
            if time.monotonic() - start > 0.5:
                break
    seconds = time.monotonic() - start
    comm.wait(pending)
    watchdog.close()
    return seconds


def test_a_limit_below_a_millisecond_is_a_limit() -> None:
    assert run_ranks(2, _short_limit)[0] < 1.5
