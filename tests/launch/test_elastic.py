"""A job goes on with the ranks that are left, in the numbers that the config allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.launcher import script, zeroshard
from zeroshard.errors import UsageError
from zeroshard.launch.agent import Outcome
from zeroshard.launch.job import Job
from zeroshard.launch.restarts import Places, run_with_restarts

_CONFIG = {"elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "max_gpus": 4}}


def test_a_killed_rank_leaves_its_place_and_the_rest_go_on_in_an_allowed_number(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(_CONFIG))  # a batch of 8 by 2: 1, 2 or 4 ranks
    text = """
        import os, signal, time
        os.write(1, (os.environ["WORLD_SIZE"] + "\\n").encode())
        if os.environ["WORLD_SIZE"] == "4" and os.environ["RANK"] == "3":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000 if os.environ["WORLD_SIZE"] == "4" else 0)
    """
    words = ["--nproc", "4", "--max-restarts", "2", "--elastic", "ds.json", "--log-dir", "logs", script(tmp_path, text)]
    done = zeroshard(tmp_path, "run", *words, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert "rank 3" in done.stderr
    assert "failed first: killed by signal SIGKILL" in done.stderr
    assert "zeroshard: restart 1 of 2\nzeroshard: 2 ranks on this node" in done.stderr
    assert sorted(path.name for path in (tmp_path / "logs").glob("*.restart_1.out")) == [
        "rank_0.restart_1.out",
        "rank_1.restart_1.out",
    ]


def test_without_place_for_an_allowed_number_nothing_is_started(tmp_path: Path) -> None:
    job = Job("script.py", sizes=(4, 8))
    with pytest.raises(UsageError, match="place for 2 ranks, the config allows 4, 8"):
        run_with_restarts(job, tmp_path, Places(2), lambda ranks: "")


@pytest.mark.parametrize(
    ("outcomes", "devices"),
    [
        ([Outcome(137, True, 1, killed=True)], "467"),
        ([Outcome(1, True, 1)], "4567"),
        ([Outcome(1, True, 1), Outcome(1, True, 1)], "467"),
        ([Outcome(1, True, 1), Outcome(1, True, 2), Outcome(1, True, 1)], "4567"),
        ([Outcome(1, True, None)], "4567"),
    ],
)
def test_a_place_is_left_out_after_a_kill_or_two_failures(outcomes: list[Outcome], devices: str) -> None:
    places = Places(4, ("4", "5", "6", "7"))
    for outcome in outcomes:
        places = places.after(outcome)
    assert "".join(places.devices or ()) == devices
    assert places.count == len(devices)


def test_a_list_of_hosts_is_not_passed_over_in_an_elastic_job(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    words = ["--nodes", "1:2", "--master-addr", "localhost", script(tmp_path, "print('started')")]
    for hosts in (["--hostfile", "hosts"], ["--include", "localhost:0"]):
        done = zeroshard(tmp_path, "run", *hosts, *words, env={"CUDA_VISIBLE_DEVICES": ""})
        assert done.returncode != 0
        assert "hosts of an elastic job come and go" in " ".join(done.stderr.split())
        assert "started" not in done.stdout


def test_a_config_that_allows_no_number_of_ranks_is_refused_with_its_file_and_the_reason(tmp_path: Path) -> None:
    config = {"elasticity": {"enabled": True, "max_train_batch_size": 1, "micro_batch_sizes": [2], "max_gpus": 4}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    done = zeroshard(tmp_path, "run", "--elastic", "ds.json", script(tmp_path, "print('started')"))
    assert done.returncode == 2
    reason = "no multiple of 2 fits on 1 to 4 ranks within max_train_batch_size 1"
    assert done.stderr == f"zeroshard: --elastic ds.json: elasticity: allows no batch: {reason}\n"
