"""What of the launcher's environment reaches the nodes, and that no value is ever an argument."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launcher import environment, script
from zeroshard.cluster import NodePlace
from zeroshard.errors import UsageError
from zeroshard.launch.dispatch import HostOptions, starter_command
from zeroshard.launch.environment import exported, find_files, read_file
from zeroshard.launch.hosts import Host
from zeroshard.launch.job import Job, TargetKind
from zeroshard.launch.starters import Launcher, StarterOptions, require, ssh_command

_HERE = {
    "NCCL_DEBUG": "INFO",
    "PYTHONPATH": "/code",
    "OMP_NUM_THREADS": "4",
    "CUDA_VISIBLE_DEVICES": "0",
    "HF_TOKEN": "hf-secret",
    "MLFLOW_TRACKING_TOKEN": "ml-secret",
    "HOME": "/root",
}


def test_the_allow_list_leaves_secrets_and_what_is_of_one_machine_at_home() -> None:
    assert exported(_HERE, (), ()) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/code", "OMP_NUM_THREADS": "4"}


def test_what_is_asked_for_goes_along_by_name_or_pattern() -> None:
    assert exported(_HERE, ("HF_*", "MLFLOW_TRACKING_TOKEN"), ()).keys() >= {"HF_TOKEN", "MLFLOW_TRACKING_TOKEN"}
    with pytest.raises(UsageError, match="--export WANDB_KEY: it is not set here"):
        exported(_HERE, ("WANDB_KEY",), ())


def test_a_file_of_variables_stands_above_the_environment(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("# for all\n\nNCCL_DEBUG=WARN\nexport A='b = c'\nEMPTY=\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.deepspeed_env").write_text("A=home\n")
    files = find_files(None, [tmp_path, tmp_path / "home"])
    assert files == [tmp_path / ".deepspeed_env"], "the nearest alone"
    chosen = exported(_HERE, (), files)
    assert (chosen["NCCL_DEBUG"], chosen["A"], chosen["EMPTY"]) == ("WARN", "b = c", "")


def test_a_wrong_line_is_named_but_not_shown(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("A=1\nTOKEN: hf-secret\n")
    with pytest.raises(UsageError, match=r"env, line 2: not of the form NAME=VALUE") as caught:
        read_file(tmp_path / "env")
    assert "hf-secret" not in str(caught.value)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for what starts nodes, which print what they were given."""
    for name in ("ssh", "mpirun", "srun"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@" "value $NCCL_SECRET_PATH"\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path / "bin"


def test_no_command_holds_a_value(programs: Path, tmp_path: Path) -> None:
    hosts, starter = (Host("a", (0, 1)), Host("b", (0,))), StarterOptions(2222, ("-i", "key file"))
    commands = [ssh_command("a", starter, Path("/w d"))]
    for launcher in (Launcher.OPENMPI, Launcher.SLURM):
        options = HostOptions(NodePlace(), hostfile=Path("hosts"), launcher=launcher)
        commands.append(starter_command(Job("t.py"), options, hosts, ["NCCL_DEBUG", "HF_TOKEN"]))
    assert not any("=INFO" in word or "secret" in word for words in commands for word in words)
    assert commands[0][-3:-1] == ["--", "a"], "a host can't be taken for an option"
    assert commands[0][-1].startswith("cd '/w d' && exec ")


def test_srun_gets_one_task_per_node(programs: Path, tmp_path: Path) -> None:
    options = HostOptions(
        NodePlace(nnodes=4), num_slots=8, launcher=Launcher.SLURM, starter=StarterOptions(arguments=("-p", "gpu"))
    )
    job = Job("t", args=("--lr", "1"), kind=TargetKind.MODULE, bind_cores=True)
    words = starter_command(job, options, None, ["NCCL_DEBUG"])
    place = words.index(sys.executable)
    assert words[:place] == [
        str(programs / "srun"),
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
        "--nodes=4",
        "--ntasks=4",
        "--export=ALL,NCCL_DEBUG",
        "-p",
        "gpu",
    ]
    node = words[place:]
    assert node[1:8] == ["-u", "-m", "zeroshard", "run", "--no-ssh", "--end-with-input", "--rendezvous"]
    assert node[8:] == [
        "slurm", "--nproc", "8", "--rendezvous-timeout", "600", "--bind-cores", "-m", "--", "t", "--lr", "1"
    ]  # fmt: skip


def test_mpirun_gets_one_process_per_host_and_names_of_variables(programs: Path, tmp_path: Path) -> None:
    script(tmp_path, "")
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    words = ["run", "--hostfile", "hosts", "--launcher", "openmpi", "--export", "NCCL_SECRET_PATH", "script.py", "x y"]
    done = subprocess.run(
        [sys.executable, "-m", "zeroshard", *words],
        cwd=tmp_path,
        env=environment({"PATH": f"{programs}:/usr/bin:/bin", "NCCL_SECRET_PATH": "hidden"}),
        text=True,
        capture_output=True,
        check=True,
    )
    said = done.stdout.splitlines()
    assert said[1:9] == ["-n", "2", "--host", "a:1,b:1", "--map-by", "ppr:1:node", "--bind-to", "none"]
    assert said[said.index("NCCL_SECRET_PATH") - 1] == "-x"
    assert said[-3:] == ["script.py", "x y", "value hidden"]
    assert said[said.index("--master-addr") + 1] == "a"
    assert "hidden" not in said[:-1]


def test_a_starter_that_is_not_there_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="--launcher slurm: there is no srun here; run on a machine of a Slurm"):
        require(Launcher.SLURM)
