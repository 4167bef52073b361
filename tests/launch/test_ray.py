"""examples/schedulers/ray_nodes.py on a Ray cluster of several nodes, of which one is removed and another one is added.

Where Ray is installed: `PYTHONPATH=. python -m pytest tests/launch/test_ray.py` in an environment that has it as well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launcher import ROOT, environment
from tests.support.elastic_train import BATCH, Line, planned, read_log, trained_on

cluster_utils: Any = pytest.importorskip("ray.cluster_utils", reason="needs ray")
pytestmark = pytest.mark.timeout(400)
_STEPS = 80
_TRAIN = f"""
from pathlib import Path
import zeroshard
from tests.support.elastic_train import train
here = Path({{here!r}})
zeroshard.run_elastic(lambda: train(here, {_STEPS}, 0, 0.3))
"""


def _files(directory: Path) -> dict[str, str]:
    """The example's directory with a script to train, three nodes of one rank without GPUs; returns the environment."""
    text = (ROOT / "examples" / "schedulers" / "ray_nodes.py").read_text()
    assert "MOST, SPARES, GPUS = 4, 1, 8" in text
    (directory / "ray_nodes.py").write_text(text.replace("= 4, 1, 8", "= 3, 0, 0"))
    shutil.copy(ROOT / "examples" / "schedulers" / "start.sh", directory)
    elasticity = {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [1], "version": 0.1}
    (directory / "ds_config.json").write_text(json.dumps({"elasticity": elasticity}))
    (directory / "train.py").write_text(_TRAIN.format(here=str(directory)))
    program = directory / "bin" / "zeroshard"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m zeroshard "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return environment({"PATH": path, "PET_NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


def _until(directory: Path, what: Callable[[Line], bool]) -> None:
    """Wait for a line of the log to be so."""
    end = time.monotonic() + 120
    while not any(what(line) for line in read_log(directory)):
        assert time.monotonic() < end, (directory / "out.txt").read_text()
        time.sleep(0.2)


def test_a_job_goes_on_without_a_node_that_is_removed_and_with_one_that_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = _files(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)  # Ray's workers have the environment of their node's daemon
    monkeypatch.chdir(tmp_path)
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
        with (tmp_path / "out.txt").open("wb") as out:
            driver = subprocess.Popen(
                [sys.executable, "ray_nodes.py"],
                cwd=tmp_path,
                env={**variables, "RAY_ADDRESS": cluster.address},
                stdout=out,
                stderr=out,
            )
        _until(tmp_path, lambda line: line.what == "step" and line.step >= 5)
        cluster.remove_node(nodes[2])
        _until(tmp_path, lambda line: line.what == "step" and line.ranks == 2)
        cluster.add_node(num_cpus=1)
        _until(tmp_path, lambda line: line.what == "step" and line.round == 2 and line.ranks == 3)
        assert driver.wait(120) == 0, (tmp_path / "out.txt").read_text()
    finally:
        cluster.shutdown()
    assert trained_on(read_log(tmp_path)) == planned(_STEPS)
