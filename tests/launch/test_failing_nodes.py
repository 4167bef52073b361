"""A node of an elastic job starts its ranks again as long as they make steps, and gives up where they make none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.launcher import script, zeroshard
from tests.support.ports import free_port

_FAILS_AT_ONCE = 'raise ValueError("planted")'
_FAILS_AFTER_EACH_SECOND_STEP = """
    import os, time
    import torch
    import zeroshard

    def train():
        config = {
            "elasticity": {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [4], "version": 0.1},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "checkpoint": {"memory_steps": 1},
        }
        engine = zeroshard.initialize(model=torch.nn.Linear(4, 1), config=config)[0]
        engine.resume()
        first = engine.global_steps
        while engine.global_steps < 7:
            engine.backward(engine(torch.ones(4, 4)).square().mean())
            engine.step()
            if engine.global_steps == first + 2 < 7:
                time.sleep(0.5)  # until the state of the step before is kept
                os._exit(1)

    zeroshard.run_elastic(train)
"""


def _run(directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    words = ["--nodes", "1:2", "--nproc", "1", "--last-call", "0.1", "--max-restarts", "1"]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), script(directory, text)]
    return zeroshard(directory, "run", *words, env={"CUDA_VISIBLE_DEVICES": ""})


def test_ranks_that_fail_in_each_round_before_a_step_are_not_started_for_ever(tmp_path: Path) -> None:
    done = _run(tmp_path, _FAILS_AT_ONCE)
    assert done.returncode == 1
    assert "starting the ranks of this node again (start 2)" in done.stderr
    assert "the ranks of this node have ended 2 times without a step: giving up" in done.stderr


@pytest.mark.skipif("ZEROSHARD_LAUNCH_TESTS" not in os.environ, reason="long: ZEROSHARD_LAUNCH_TESTS=1")
def test_failures_with_steps_between_them_do_not_add_up(tmp_path: Path) -> None:
    done = _run(tmp_path, _FAILS_AFTER_EACH_SECOND_STEP)
    assert done.returncode == 0, done.stderr
    assert "(start 4)" in done.stderr
