"""Nothing runs on once the launcher has been told to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.launcher import script, start
from zeroshard.launch.guard import _processes

# Each rank has a child of its own, as a data loader or a monitor would be.
_LONG = """
    import os, subprocess, sys, time
    child = subprocess.Popen(["sleep", "1000"])
    sys.stdout.write(f"{os.getpid()} {child.pid}\\n")
    sys.stdout.flush()
    time.sleep(1000)
"""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    # A zombie whose new parent has not read its status yet is no longer running.
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def _guards(pid: int, number: signal.Signals) -> bool:
    """Whether the process has taken over the signal: it holds it back, or has a child already, and waits for signals.

    While a process waits for a signal the kernel does not show it as held back.
    """
    mask = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    assert mask is not None
    return bool(int(mask[1], 16) >> (number - 1) & 1) or any(parent == pid for _, parent, _ in _processes())


def _left_running(pids: list[int], seconds: float = 5.0) -> list[int]:
    """Those of `pids` that live on; the kernel takes a moment to end a process."""
    deadline = time.monotonic() + seconds
    while (alive := [pid for pid in pids if _alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_stop_signal_ends_the_ranks_and_what_they_started(tmp_path: Path, number: signal.Signals) -> None:
    launcher = start(tmp_path, "run", "--nproc", "2", script(tmp_path, _LONG), stderr=subprocess.PIPE)
    assert launcher.stdout is not None
    pids = [int(word) for _ in range(2) for word in launcher.stdout.readline().split()]
    assert len(pids) == 4
    assert all(_alive(pid) for pid in pids)

    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=120)

    assert launcher.returncode == 128 + number
    assert said.splitlines()[1:] == [f"zeroshard: {number.name} received, all ranks ended"]
    assert _left_running(pids) == []


_SAVES = """
    import os, signal, sys, time
    stop = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    pid, directory = os.environ["ZEROSHARD_RANK_FILES"].split(":")
    assert pid == str(os.getpid())
    open(f"{directory}/{pid}.saves", "w").close()
    os.write(1, b"going %d\\n" % os.getpid())
    while not stop:
        time.sleep(0.01)
    # One does not end in time.
    time.sleep(0 if os.environ["RANK"] == "0" else SECONDS)
    sys.exit(75)
"""


def test_ranks_that_save_at_a_signal_are_asked_once_and_are_not_restarted(tmp_path: Path) -> None:
    words = ["run", "--nproc", "2", "--max-restarts", "3"]
    launcher = start(tmp_path, *words, script(tmp_path, _SAVES.replace("SECONDS", "1")), stderr=subprocess.PIPE)
    assert launcher.stdout is not None
    assert all(launcher.stdout.readline().startswith("going") for _ in range(2))
    launcher.send_signal(signal.SIGTERM)
    out, said = launcher.communicate(timeout=120)
    assert (launcher.returncode, out) == (75, ""), said
    assert "SIGTERM received: the ranks finish their step, save and end" in said
    assert said.splitlines()[-1] == "zeroshard: the ranks were told to stop and have saved; status 75"


def test_a_signal_to_every_process_of_a_job_asks_its_ranks_once(tmp_path: Path) -> None:
    """As Slurm without cgroups sends it."""
    name = script(tmp_path, _SAVES.replace("SECONDS", "1"))
    launcher = start(tmp_path, "run", "--nproc", "2", name, stderr=subprocess.PIPE)
    assert launcher.stdout is not None
    ranks = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
    agent = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (launcher.pid, agent, *ranks):
        os.kill(pid, signal.SIGTERM)
    _, said = launcher.communicate(timeout=120)
    assert launcher.returncode == 75, said


@pytest.mark.skipif("ZEROSHARD_LAUNCH_TESTS" not in os.environ, reason="long: ZEROSHARD_LAUNCH_TESTS=1")
def test_a_second_signal_does_not_wait_for_ranks_that_save(tmp_path: Path) -> None:
    name = script(tmp_path, _SAVES.replace("SECONDS", "1000"))
    launcher = start(tmp_path, "run", "--nproc", "2", name, stderr=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stderr is not None
    pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
    launcher.send_signal(signal.SIGTERM)
    while "save and end" not in launcher.stderr.readline():
        pass
    time.sleep(0.6)  # within half a second it is the same request
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=120)
    assert launcher.returncode == 128 + signal.SIGTERM, said
    assert _left_running(pids) == []


def test_a_second_ctrl_c_does_not_wait_for_ranks_that_ignore_the_first(tmp_path: Path) -> None:
    text = """
        import os, signal, time
        signal.signal(signal.SIGINT, lambda number, frame: os.write(1, b"ignored\\n"))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(1, b"%d\\n" % os.getpid())
        while True:
            time.sleep(1)
    """
    launcher = start(tmp_path, "run", "--nproc", "1", script(tmp_path, text), stderr=subprocess.PIPE)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout.readline() == "ignored\n"
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=8)

    assert launcher.returncode == 128 + signal.SIGINT
    assert _left_running([pid]) == []


def test_a_second_ctrl_c_while_what_ranks_left_is_ended_changes_nothing(tmp_path: Path) -> None:
    text = """
        import os, subprocess, sys, time
        child = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
        left = subprocess.Popen([sys.executable, "-c", child], start_new_session=True, stdout=subprocess.PIPE)
        left.stdout.readline()
        print(left.pid, flush=True)
        time.sleep(1000)
    """
    launcher = start(tmp_path, "run", "--nproc", "1", script(tmp_path, text), stderr=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stderr is not None
    pid = int(launcher.stdout.readline())
    launcher.send_signal(signal.SIGINT)
    while "all ranks ended" not in launcher.stderr.readline():
        pass
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=120)
    assert (launcher.returncode, said) == (128 + signal.SIGINT, "")
    assert _left_running([pid]) == []


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for the agent in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_launcher_is_starting_is_named(tmp_path: Path, number: signal.Signals) -> None:
    name = script(tmp_path, "import time; time.sleep(1000)")
    launcher = start(tmp_path, "run", "--nproc", "1", name, stderr=subprocess.PIPE)
    while not _guards(launcher.pid, number):
        time.sleep(0.005)
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=120)
    assert launcher.returncode == 128 + number
    assert said.splitlines()[-1] == f"zeroshard: {number.name} received, all ranks ended"


_SIGNAL_AMID_THE_FORK = """
import os, signal, sys, time
from zeroshard.launch import guard
os.register_at_fork(**{sys.argv[1]: lambda: os.kill(os.getpid(), int(sys.argv[2]))})
killed = lambda number: print(number.name, flush=True)
sys.exit(guard.run_guarded(lambda directory: time.sleep(1000), killed))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("process", ["after_in_child", "after_in_parent"])
def test_a_signal_amid_the_fork_of_the_agent_is_not_lost(tmp_path: Path, process: str, number: signal.Signals) -> None:
    launcher = start(tmp_path, "-c", _SIGNAL_AMID_THE_FORK, process, str(int(number)), stderr=subprocess.PIPE)
    out, said = launcher.communicate(timeout=120)
    assert (launcher.returncode, out) == (128 + number, f"{number.name}\n"), said


@pytest.mark.skipif(not Path("/proc").exists(), reason="the kernel ends orphaned ranks on Linux only")
def test_ranks_do_not_outlive_a_launcher_that_was_killed(tmp_path: Path) -> None:
    text = """
        import os, subprocess, time
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print(os.getpid(), child.pid, flush=True)
        time.sleep(1000)
    """
    launcher = start(tmp_path, "run", "--nproc", "2", script(tmp_path, text), stderr=subprocess.DEVNULL)
    assert launcher.stdout is not None
    pids = [int(word) for _ in range(2) for word in launcher.stdout.readline().split()]

    launcher.kill()
    launcher.communicate(timeout=120)  # ends when the last holder of the pipe has gone

    assert _left_running(pids) == []


def test_what_a_dead_rank_left_behind_is_ended(tmp_path: Path) -> None:
    text = """
        import os, subprocess, time
        if os.environ["RANK"] == "0":
            child = subprocess.Popen(["sleep", "1000"])
            print(child.pid, flush=True)
            os._exit(5)
        time.sleep(1000)
    """
    launcher = start(tmp_path, "run", "--nproc", "2", script(tmp_path, text), stderr=subprocess.PIPE)
    out, said = launcher.communicate(timeout=120)

    assert launcher.returncode == 5
    assert "exit code 5, without a traceback" in said
    assert _left_running([int(out)]) == []


def test_an_agent_that_was_killed_is_named_and_what_its_ranks_started_is_ended(tmp_path: Path) -> None:
    text = """
        import os, subprocess, time
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print(os.getppid(), os.getpid(), child.pid, flush=True)
        time.sleep(1000)
    """
    launcher = start(tmp_path, "run", "--nproc", "1", script(tmp_path, text), stderr=subprocess.PIPE)
    assert launcher.stdout is not None
    agent, *pids = map(int, launcher.stdout.readline().split())
    os.kill(agent, signal.SIGKILL)
    _, said = launcher.communicate(timeout=120)

    assert launcher.returncode == 128 + 9
    assert said.splitlines()[1:] == ["zeroshard: the agent was killed by SIGKILL; ending all ranks"]
    assert _left_running(pids) == []
