"""examples/schedulers/slurm.sbatch on a Slurm cluster: jobs that lose a node, are preempted, and are cancelled.

With ZEROSHARD_SLURM_TESTS=1, as root, where Debian's slurm-wlm and munge are installed: the cluster is made in a
temporary directory, with three nodes on this host. Each of the jobs takes about a minute.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.launcher import ROOT
from tests.launch.slurm_cluster import Cluster, make_cluster, why_not
from tests.support.elastic_job import made
from tests.support.elastic_train import BATCH, planned, read_log, trained_on

_REASON = why_not()
pytestmark = [
    pytest.mark.skipif("ZEROSHARD_SLURM_TESTS" not in os.environ, reason="long: ZEROSHARD_SLURM_TESTS=1"),
    pytest.mark.skipif(_REASON is not None, reason=f"a Slurm cluster: {_REASON}"),
    pytest.mark.timeout(600),
]
_STEPS = 40
_TRAIN = f"""
from pathlib import Path
import zeroshard
from tests.support.elastic_train import train
here = Path(__file__).parent
zeroshard.run_elastic(lambda: train(here, {_STEPS}, 0, 0.3, here / "checkpoints", 0))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with make_cluster(tmp_path_factory.mktemp("slurm"), 3) as made_cluster:
        yield made_cluster


def _submit(cluster: Cluster, directory: Path) -> str:
    """The example's script as it is, on three nodes of one rank, in a directory with all that it needs."""
    for name in ("slurm.sbatch", "start.sh"):
        shutil.copy(ROOT / "examples" / "schedulers" / name, directory)
    elasticity = {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [1], "version": 0.1}
    (directory / "ds_config.json").write_text(json.dumps({"elasticity": elasticity}))
    (directory / "train.py").write_text(_TRAIN)
    program = directory / "bin" / "zeroshard"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m zeroshard "$@"\n')
    program.chmod(0o755)
    variables = {"NODES": "2:3", "SPARES": "0", "PET_NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
    path = f"{program.parent}:{os.environ['PATH']}"
    return cluster.submit(
        directory,
        "--nodes=3",
        "--output=out.txt",
        "slurm.sbatch",
        env={**variables, "PATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )


def _after_step(directory: Path, step: int) -> Callable[[dict[str, str]], bool]:
    return lambda job: job["JobState"] == "RUNNING" and made(read_log(directory), step)


def _has_ended(job: dict[str, str]) -> bool:
    return job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def test_a_job_goes_on_without_a_node_that_is_lost_and_has_completed(tmp_path: Path, cluster: Cluster) -> None:
    number = _submit(cluster, tmp_path)
    cluster.until(number, _after_step(tmp_path, 5), 120)
    cluster.power_off("node2", number)
    try:
        job = cluster.until(number, _has_ended, 120)
    finally:
        cluster.start("node2")
    lines = read_log(tmp_path)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), (tmp_path / "out.txt").read_text()
    assert {(line.round, line.ranks) for line in lines} == {(0, 3), (1, 2)}
    assert trained_on(lines) == planned(_STEPS)


def _by_usr1(cluster: Cluster, number: str) -> None:
    """As Slurm sends it some time before the end of the job's time."""
    cluster.command("scancel", "--signal=USR1", "--batch", number)


def _by_preemption(cluster: Cluster, number: str) -> None:
    cluster.submit(cluster.directory, "--partition=high", "--nodes=3", "--gpus-per-node=8", "--wrap=sleep 5")


@pytest.mark.parametrize("stop", [_by_usr1, _by_preemption], ids=["USR1", "preemption"])
def test_a_job_that_has_to_stop_saves_is_queued_again_and_resumes(
    tmp_path: Path, cluster: Cluster, stop: Callable[[Cluster, str], None]
) -> None:
    cluster.until_idle()
    number = _submit(cluster, tmp_path)
    cluster.until(number, _after_step(tmp_path, 5), 120)
    stop(cluster, number)
    cluster.until(number, lambda job: job["JobState"] == "PENDING" and job["Restarts"] == "1", 60)
    saved = max(line.step for line in read_log(tmp_path))
    cluster.command("scontrol", "update", f"JobId={number}", "StartTime=now")  # Slurm would wait for a minute
    job = cluster.until(number, _has_ended, 120)
    lines = read_log(tmp_path)
    assert job["JobState"] == "COMPLETED", (tmp_path / "out.txt").read_text()
    assert [line.step for line in lines if line.what == "resumed"] == [0, 0, 0, saved, saved, saved]
    assert trained_on(lines) == planned(_STEPS)


def test_a_job_that_is_cancelled_saves_and_is_not_queued_again(tmp_path: Path, cluster: Cluster) -> None:
    cluster.until_idle()
    number = _submit(cluster, tmp_path)
    cluster.until(number, _after_step(tmp_path, 5), 120)
    cluster.command("scancel", number)
    job = cluster.until(number, _has_ended, 60)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    saved = max(line.step for line in read_log(tmp_path))
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"global_step{saved}"
