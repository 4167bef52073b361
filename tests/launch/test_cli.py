"""Mistakes on the command line end in one clear line and status 2, before anything is started."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import zeroshard as package
from tests.launch.launcher import environment, script, zeroshard
from zeroshard.errors import UsageError
from zeroshard.launch.cli import app
from zeroshard.launch.resources import resolve_nproc, set_threads, usable_cores


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nope.py"], "nope.py: no such script"),
        (["-m", "nope.train"], "-m nope.train: no such module in {cwd} or among the installed packages"),
        (["--nnodes", "2", "s.py"], "--nnodes 2: the nodes meet at node 0; give its address as --master-addr"),
        (["--node-rank", "1", "s.py"], "--node-rank 1: with --nnodes 1 it is from 0 to 0"),
        (["--nproc", "many", "s.py"], "--nproc many: expected a number from 1 to 4096, or auto, gpu or cpu"),
        (["--nproc", "0", "s.py"], "--nproc 0: expected a number from 1 to 4096, or auto, gpu or cpu"),
        ([""], "'': no such script"),
        (["."], ".: a folder without __main__.py; name a script"),
        (["--console", "first", "s.py"], "--console first: give the files in which the output is to be, as --log-dir"),
        (["--spares", "1", "s.py"], "--spares: spare nodes are those of an elastic job; give --nodes MIN:MAX"),
        (
            ["--on-sigterm", "leave", "s.py"],
            "--on-sigterm: nodes of elastic jobs may leave alone; give --nodes MIN:MAX",
        ),
        (["--force-multi", "s.py"], "--force-multi needs a --hostfile"),
        (["--export", "NOT_SET", "s.py"], "--export NOT_SET: it is not set here"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: list[str], line: str) -> None:
    script(tmp_path, "", "s.py")
    done = zeroshard(tmp_path, "run", *words)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"zeroshard: {line.format(cwd=tmp_path)}"]


def test_a_rendezvous_at_etcd_is_refused_with_the_reason(tmp_path: Path) -> None:
    done = zeroshard(tmp_path, "run", "--rendezvous", "etcd://host:2379", script(tmp_path, "", "s.py"))
    assert done.returncode == 2
    assert "EtcdStore lacks" in " ".join(done.stderr.replace("│", " ").split())
    assert "none of env, kubernetes" in " ".join(
        zeroshard(tmp_path, "run", "--rendezvous", "consul", "s.py").stderr.replace("│", " ").split()
    )


def test_a_file_of_variables_that_is_named_reaches_ranks_of_this_host_too(tmp_path: Path) -> None:
    name = script(tmp_path, "import os; print(os.environ['COLOUR'])")
    missing = zeroshard(tmp_path, "run", "--nproc", "1", "--env-file", "variables", name)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "variables: the file of variables can't be read" in missing.stderr
    (tmp_path / "variables").write_text("COLOUR=green\n")
    done = zeroshard(tmp_path, "run", "--nproc", "1", "--env-file", "variables", name)
    assert (done.returncode, done.stdout) == (0, "green\n"), done.stderr


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        name = script(tmp_path, "")
        done = zeroshard(tmp_path, "run", "--nproc", "1", "--master-port", str(port), name)
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == [
        f"zeroshard: --master-port {port}: this node can't listen on it (Address already in use); "
        "choose another, or on a single node leave it out"
    ]


def test_a_named_port_is_used(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    name = script(tmp_path, "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")
    done = zeroshard(tmp_path, "run", "--nproc", "1", "--master-port", str(port), name)
    assert (done.returncode, done.stdout) == (0, f"localhost {port}\n"), done.stderr


def test_the_version_is_printed() -> None:
    for word in ("version", "--version"):
        assert CliRunner().invoke(app, [word]).stdout == f"{package.__version__}\n"


def test_the_commands_module_is_the_command_too() -> None:
    words = [sys.executable, "-m", "zeroshard.launch.cli", "--version"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == f"{package.__version__}\n"


@pytest.mark.parametrize("command", ["config", "plan", "doctor", "checkpoint"])
def test_no_command_offers_a_completion_that_would_not_work(command: str) -> None:
    assert "completion" not in CliRunner().invoke(app, [command, "--help"]).stdout


def test_the_command_line_loads_nothing_of_torchs_launcher_before_it_is_needed() -> None:
    code = "import sys, zeroshard.launch.cli; sys.exit('torch.distributed.launcher' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def test_ranks_are_counted_from_gpus_then_cores() -> None:
    assert resolve_nproc("3", count_gpus=lambda: 0) == 3
    assert resolve_nproc("auto", count_gpus=lambda: 4) == 4
    assert resolve_nproc("gpu", count_gpus=lambda: 4) == 4
    assert resolve_nproc("auto", count_gpus=lambda: 0) == usable_cores()
    assert resolve_nproc("cpu", count_gpus=lambda: 4) == usable_cores()


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(UsageError, match="--nproc 3: this node has 2 GPUs; use fewer ranks"):
        resolve_nproc("3", count_gpus=lambda: 2)
    with pytest.raises(UsageError, match="--nproc gpu: torch sees no GPU"):
        resolve_nproc("gpu", count_gpus=lambda: 0)


def test_a_number_of_ranks_that_no_node_can_run_is_refused() -> None:
    for text in ("0", "-1", "1.5", "", "4097", "9" * 5000, "\u0663"):
        with pytest.raises(UsageError, match="expected a number from 1 to 4096"):
            resolve_nproc(text, count_gpus=lambda: 0)


def test_cores_are_divided_among_the_ranks_unless_the_user_has_chosen() -> None:
    environ: dict[str, str] = {}
    set_threads(1, environ)
    assert environ == {"OMP_NUM_THREADS": str(usable_cores())}
    environ = {}
    set_threads(10_000, environ)
    assert environ == {"OMP_NUM_THREADS": "1"}
    environ = {"OMP_NUM_THREADS": "5"}
    assert "5" in set_threads(2, environ)
    assert environ == {"OMP_NUM_THREADS": "5"}
