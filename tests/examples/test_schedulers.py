"""The files for schedulers start the same script, whose command is one that `zeroshard run` takes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from zeroshard.launch import cli
from zeroshard.launch.dispatch import HostOptions
from zeroshard.launch.job import Job

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "schedulers"
START = FOLDER / "start.sh"


def test_the_script_starts_a_node_of_an_elastic_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = tmp_path / "zeroshard"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    (tmp_path / "ds_config.json").write_text('{"elasticity": {"enabled": true, "micro_batch_sizes": [2]}}')
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODES": "2:4", "SPARES": "1", "MEET": "head"}
    words = subprocess.run(["sh", str(START), "--lr", "1"], env=environment, capture_output=True, text=True, check=True)
    given: list[tuple[Job, HostOptions]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.dispatch, "run", lambda job, options: given.append((job, options)) or 0)
    cli.app(words.stdout.split(), standalone_mode=False)
    ((job, options),) = given
    assert (job.nodes, job.spares, job.target, job.args) == ((2, 4), 1, "train.py", ("--lr", "1"))
    assert job.sizes
    assert options.given.master_addr == "head"


def test_the_page_shows_the_script_and_every_file_starts_it() -> None:
    page = (ROOT / "docs" / "schedulers.md").read_text()
    assert START.read_text() in page
    assert len(START.read_text().splitlines()) == 2
    for path in FOLDER.iterdir():
        assert f"examples/schedulers/{path.name}" in page
        assert "start.sh" in path.read_text() or path == START


@pytest.mark.parametrize("name", ["jobset", "pytorchjob", "sky"])
def test_manifests_are_yaml(name: str) -> None:
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert found


def test_skypilot_takes_the_task() -> None:
    sky: Any = pytest.importorskip("sky", reason="needs skypilot")
    task = sky.Task.from_yaml(str(FOLDER / "sky.yaml"))
    assert (task.num_nodes, task.workdir) == (4, ".")


def _core_parts() -> dict[str, dict[str, Any]]:
    """Jobs and pods in the manifests, as objects of their own."""
    jobs = yaml.safe_load((FOLDER / "jobset.yaml").read_text())["spec"]["replicatedJobs"]
    pods = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())["spec"]["pytorchReplicaSpecs"]
    meta = {"metadata": {"name": "part"}}
    found = {f"job {one['name']}": {"apiVersion": "batch/v1", "kind": "Job", **meta, **one["template"]} for one in jobs}
    return found | {
        f"pod {name}": {"apiVersion": "v1", "kind": "Pod", **meta, **one["template"]} for name, one in pods.items()
    }


@pytest.mark.parametrize("part", ["job meet", "job node", "pod Master", "pod Worker"])
def test_kubernetes_takes_the_jobs_and_pods(part: str) -> None:
    checker: Any = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    checker.validate(_core_parts()[part], checker.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["start.sh", "slurm.sbatch"])
def test_scripts_are_of_the_shell(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


def test_the_program_for_ray_compiles() -> None:
    compile((FOLDER / "ray_nodes.py").read_text(), "ray_nodes.py", "exec")
