"""A node of an elastic job that gets SIGTERM leaves alone, without a lost step; or all save, where it can't."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.elastic_job import ElasticJob, made
from tests.support.elastic_train import BATCH, Line, planned, trained_on
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(400)
_STEPS = 40


def _job(directory: Path, *words: str, saves: bool = False, rendezvous: bool = True) -> ElasticJob:
    config = {"elasticity": {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [1], "version": 0.1}}
    (directory / "ds.json").write_text(json.dumps(config))
    options = ["--nodes", "2:3", "--nproc", "1", "--elastic", str(directory / "ds.json"), "--last-call", "60", *words]
    script = [str(_STEPS), "0", "0.2", *([str(directory / "checkpoints")] if saves else [])]
    return ElasticJob(directory, None, options, script, free_port(), rendezvous)


def _rounds_of_steps(lines: list[Line]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for line in lines:
        if line.what == "step":
            found.setdefault(line.step, set()).add(line.round)
    return found


@pytest.mark.parametrize("saves", [False, True], ids=["", "with-checkpoints"])
def test_a_node_leaves_alone_and_no_step_is_made_again(tmp_path: Path, saves: bool) -> None:
    with _job(tmp_path, saves=saves) as job:
        for node in range(3):
            job.start(node)
        job.until(lambda lines: made(lines, 5), 120)
        job.terminate(0)  # the node that decides
        lines = job.until(lambda lines: sum(line.what == "end" for line in lines) == 2, 120)
        assert [job.wait(node, 30) for node in range(3)] == [75, 0, 0]
        assert any("has left the job" in line for line in job.outputs[0])
    assert trained_on(lines) == planned(_STEPS)
    assert all(len(rounds) == 1 for rounds in _rounds_of_steps(lines).values())
    assert {(line.round, line.ranks) for line in lines} == {(0, 3), (1, 2)}


@pytest.mark.parametrize(
    ("words", "told", "rendezvous"),
    [((), (0, 1), True), (("--on-sigterm", "save"), (2,), True), ((), (0,), False)],
    ids=["too-few-stay", "on-sigterm-save", "a-node-that-serves-the-rendezvous"],
)
def test_all_nodes_save(tmp_path: Path, words: tuple[str, ...], told: tuple[int, ...], rendezvous: bool) -> None:
    with _job(tmp_path, *words, saves=True, rendezvous=rendezvous) as job:
        for node in range(3):
            job.start(node)
            if not rendezvous and node == 0:
                job.until(lambda _: any("node 0 of" in line for line in job.outputs.get(0, [])), 60)
        job.until(lambda lines: made(lines, 5), 120)
        for node in told:
            job.terminate(node)
        assert [job.wait(node, 60) for node in range(3)] == [75, 75, 75]
        saved = max(line.step for line in job.log())
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"global_step{saved}"
