"""Jobs that Slurm starts, with a stand-in for srun that starts its tasks on this host as srun does on its nodes.

The stand-in keeps what the launcher relies on: a task per node with Slurm's variables, input passed on to the tasks,
the other tasks ended when one fails (--kill-on-bad-exit), and tasks that outlive an srun that is killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.launcher import script, start, zeroshard
from zeroshard.cluster import slurm_port

_SRUN = f"""#!{sys.executable}
import os, subprocess, sys, time
options = [word for word in sys.argv[1 : sys.argv.index(sys.executable)]]
assert "--ntasks-per-node=1" in options and "--kill-on-bad-exit=1" in options, options
tasks = int(next(word for word in options if word.startswith("--ntasks=")).partition("=")[2])
started = []
for number in range(tasks):
    variables = {{"SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_LOCALID": "0",
                 "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost,node[1-%d]" % (tasks - 1)}}
    command = sys.argv[sys.argv.index(sys.executable):]
    started.append(subprocess.Popen(command, env={{**os.environ, **variables}}))
status = 0
while any(task.poll() is None for task in started):
    failed = [task.poll() for task in started if task.poll()]
    if failed and not status:
        status = failed[0]
        for task in started:
            task.terminate()
    time.sleep(0.05)
sys.exit(status or max(task.poll() for task in started))
"""


@pytest.fixture
def allocation(tmp_path: Path) -> dict[str, str]:
    """The environment inside an allocation; a job number whose port is free."""
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(_SRUN)
    program.chmod(0o755)
    for job in range(1, 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("", slurm_port({"SLURM_JOB_ID": str(job)})))
            except OSError:
                continue
        return {"SLURM_JOB_ID": str(job), "PATH": f"{program.parent}:/usr/bin:/bin", "OUT": str(tmp_path)}
    raise AssertionError("no free port")


_JOB = ("run", "--launcher", "slurm", "--num-nodes", "2", "--num-gpus", "1")


def test_a_job_over_two_nodes_meets_and_has_the_exported_environment(
    tmp_path: Path, allocation: dict[str, str]
) -> None:
    name = script(
        tmp_path,
        """
        import json, os
        from pathlib import Path
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_DEBUG")
        seen = [os.environ[name] for name in names]
        Path(os.environ["OUT"], os.environ["RANK"]).write_text(json.dumps(seen))
        """,
    )
    done = zeroshard(tmp_path, *_JOB, name, env={**allocation, "NCCL_DEBUG": "INFO"})
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / str(rank)).read_text()) == [str(rank), "2", "0", "1", "INFO"]


LONG = pytest.mark.skipif(
    not os.environ.get("ZEROSHARD_LAUNCH_TESTS"), reason="takes long: ZEROSHARD_LAUNCH_TESTS=1 runs it"
)

_WAITING = """
    import os, time
    from pathlib import Path
    Path(os.environ["OUT"], "pid-" + os.environ["RANK"]).write_text(str(os.getpid()))
    while not all(Path(os.environ["OUT"], f"pid-{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    if os.environ["RANK"] == os.environ.get("FAILS"):
        raise ValueError("planted")
    time.sleep(1000)
"""


def _wait_for_end(tmp_path: Path) -> None:
    for rank in range(2):
        pid = (tmp_path / f"pid-{rank}").read_text()
        for _ in range(1200):
            status = Path("/proc", pid, "status")
            if not status.exists() or re.search(r"State:\tZ", status.read_text()):
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"rank {rank} is still running")


@LONG
def test_a_rank_that_fails_is_named_first_and_ends_both_nodes(tmp_path: Path, allocation: dict[str, str]) -> None:
    done = zeroshard(tmp_path, *_JOB, script(tmp_path, _WAITING), env={**allocation, "FAILS": "1"})
    assert done.returncode == 1
    failures = [line for line in done.stderr.splitlines() if "failed first" in line]
    assert re.search(r"rank 1 \(.*\) failed first: ValueError: planted", failures[0]), done.stderr
    _wait_for_end(tmp_path)


@LONG
def test_tasks_end_with_an_srun_that_is_killed(tmp_path: Path, allocation: dict[str, str]) -> None:
    running = start(tmp_path, *_JOB, script(tmp_path, _WAITING), stderr=subprocess.DEVNULL, env=allocation)
    try:
        for _ in range(2400):
            if all((tmp_path / f"pid-{rank}").exists() for rank in range(2)):
                break
            time.sleep(0.05)
    finally:
        running.send_signal(signal.SIGKILL)  # the launcher has become srun
        running.wait()
    _wait_for_end(tmp_path)
