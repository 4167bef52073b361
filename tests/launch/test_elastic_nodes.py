"""Nodes of a job are lost and come again, and the job goes on: real nodes, in network namespaces, and real kills.

With ZEROSHARD_LAUNCH_TESTS=1; `python -m benchmarks elastic` is the long run of many kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launch.hosts import TestHosts, make_hosts, why_not
from tests.support.distributed import run_ranks
from tests.support.elastic_job import ElasticJob, made
from tests.support.elastic_train import BATCH, Line, planned, read_log, train, trained_on

_REASON = why_not()
pytestmark = [
    pytest.mark.skipif(_REASON is not None, reason=f"test hosts: {_REASON}"),
    pytest.mark.skipif("ZEROSHARD_LAUNCH_TESTS" not in os.environ, reason="long: ZEROSHARD_LAUNCH_TESTS=1"),
    pytest.mark.timeout(900),
]
_STEPS = 100


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TestHosts]:
    (tmp_path / "hosts").mkdir()
    with make_hosts(tmp_path / "hosts", 4) as made_hosts:
        yield made_hosts


def _job(directory: Path, hosts: TestHosts, *, shard: int, seconds: float = 0.2, spares: int = 0) -> ElasticJob:
    config = {"elasticity": {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [1], "version": 0.1}}
    (directory / "ds.json").write_text(json.dumps(config))
    most = 4 - spares
    words = ["--nodes", f"2:{most}", "--spares", str(spares), "--nproc", "2", "--elastic", str(directory / "ds.json")]
    return ElasticJob(
        directory, hosts, [*words, "--lost-after", "2", "--last-call", "120"], [str(_STEPS), str(shard), str(seconds)]
    )


def _pause(lines: list[Line], number: int) -> float:
    """Seconds from the last step before a round to the first one in it, without the step itself."""
    before = max(line.when for line in lines if line.what == "step" and line.round < number)
    return min(line.when for line in lines if line.what == "step" and line.round == number) - before


def _planned_rank(rank: int, size: int, directory: str, until: int, shard: int) -> None:
    train(Path(directory), until, shard, checkpoints=Path(directory) / "checkpoints")


def _planned_end(directory: Path, parts: list[tuple[int, int]], shard: int) -> str:
    """The digest of a run that was planned to have so many ranks until such steps."""
    directory.mkdir()
    for ranks, until in parts:
        run_ranks(ranks, _planned_rank, str(directory), until, shard)
    return [line.more for line in read_log(directory) if line.what == "end" and line.rank == 0][-1]


def test_a_lost_node_is_gone_on_without_and_comes_back_bit_for_bit_as_planned(tmp_path: Path, hosts: TestHosts) -> None:
    with _job(tmp_path, hosts, shard=2) as job:
        for node in range(4):
            job.start(node)
        job.until(lambda lines: made(lines, 10), 180)
        lost = random.Random(os.getpid()).randrange(4)
        job.power_off(lost)
        job.until(lambda lines: any(line.what == "step" and line.round == 1 for line in lines), 60)
        job.start(lost)
        job.until(lambda lines: any(line.what == "step" and line.round == 2 for line in lines), 180)
        lines = job.until(lambda lines: sum(line.what == "end" for line in lines) == 8, 180)
        assert [job.wait(node, 30) for node in range(4)] == [0, 0, 0, 0]
    assert trained_on(lines) == planned(_STEPS)
    resumed = {line.round: line for line in lines if line.what == "resumed"}
    assert [resumed[number].ranks for number in (0, 1, 2)] == [8, 6, 8]
    assert all(
        f"step {resumed[number].step} of round {number - 1} in memory" == resumed[number].more for number in (1, 2)
    )
    assert _pause(lines, 1) < 5.0
    parts = [(8, resumed[1].step), (6, resumed[2].step), (8, _STEPS)]
    (end,) = (line.more for line in lines if line.what == "end" and line.rank == 0)
    assert end == _planned_end(tmp_path / "planned", parts, 2)


def test_a_spare_takes_the_place_of_a_node_whose_rank_was_stopped(tmp_path: Path, hosts: TestHosts) -> None:
    with _job(tmp_path, hosts, shard=0, spares=1) as job:
        for node in range(4):
            job.start(node)
        job.until(lambda lines: made(lines, 5), 180)
        training = next(node for node in range(4) if any("round 0" in line for line in job.outputs.get(node, [])))
        os.kill(job.ranks(training)[1], signal.SIGSTOP)
        lines = job.until(lambda lines: sum(line.what == "end" for line in lines) >= 6, 240)
    assert trained_on(lines) == planned(_STEPS)
    assert {line.ranks for line in lines} == {6}


def test_a_node_without_its_network_is_lost_and_ends_its_ranks(tmp_path: Path, hosts: TestHosts) -> None:
    with _job(tmp_path, hosts, shard=2) as job:
        for node in range(4):
            job.start(node)
        job.until(lambda lines: made(lines, 5), 180)
        with hosts.unplugged(hosts.names[2]):
            job.until(lambda lines: any(line.what == "step" and line.round == 1 for line in lines), 60)
            assert job.wait(2, 60) == 1
        lines = job.until(lambda lines: sum(line.what == "end" for line in lines) == 6, 180)
    assert trained_on(lines) == planned(_STEPS)
    assert _pause(lines, 1) < 12.0
    assert any("the rendezvous has not answered" in line for line in job.outputs[2])
    assert not dist.is_initialized()
