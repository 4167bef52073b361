"""When a rank dies, the launcher says which one and why before anything else, and ends the others."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.launch.launcher import environment, script, zeroshard
from zeroshard.launch.failures import RankProcess, RankWatch
from zeroshard.launch.runner import STARTED_FILE


def _failing(directory: Path, text: str, *options: str) -> tuple[int, list[str]]:
    """Exit status and what was said, without the opening line on threads."""
    ranks = () if "--nproc" in options else ("--nproc", "2")
    done = zeroshard(directory, "run", *ranks, *options, script(directory, text))
    opening, *said = done.stderr.splitlines()
    assert "OMP_NUM_THREADS" in opening
    return done.returncode, said


def test_an_exception_is_reported_first_with_its_traceback_and_once(tmp_path: Path) -> None:
    status, said = _failing(
        tmp_path,
        """
        import os, time
        def explode():
            raise ValueError("planted")
        if os.environ["RANK"] == "1":
            explode()
        time.sleep(100)
        """,
    )
    assert status == 1
    assert re.fullmatch(
        r"zeroshard: rank 1 \(local rank 1, host \S+, pid \d+\) failed first: ValueError: planted", said[0]
    )
    assert said[1] == "Traceback (most recent call last):"
    assert 'script.py", line 6, in <module>' in said[2], "no frame of the launcher's above the script's"
    text = "\n".join(said)
    assert "in explode" in text
    assert text.count("ValueError: planted") == 2, "in the headline and under the traceback"
    assert said[-1] == "zeroshard: ended 1 other rank"


def test_a_killed_rank_is_named_with_its_signal_before_the_peers_that_lost_it(tmp_path: Path) -> None:
    status, said = _failing(
        tmp_path,
        """
        import fcntl, os, signal, subprocess, time
        from pathlib import Path
        lock = open("lock", "w")
        if os.environ["RANK"] == "1":
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path("locked").touch()
            while not Path("peer-waits").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        while not Path("locked").exists():
            time.sleep(0.01)
        Path("peer-waits").touch()
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the death of rank 1, as a collective would notice it
        raise ConnectionError("lost a peer")
        """,
    )
    assert status == 128 + 9
    assert re.match(r"zeroshard: rank 1 \(.*\) failed first: killed by signal SIGKILL \(", said[0])
    # The agent may end the peer before it has raised.
    assert said[1:] in (["zeroshard: then rank 0: ConnectionError: lost a peer"], ["zeroshard: ended 1 other rank"])


def test_a_rank_whose_status_the_agent_took_before_the_news_goes_before_those_that_it_ended(tmp_path: Path) -> None:
    for taken, status, number in ((0, 1, signal.SIGTERM), (1, -9, signal.SIGTERM), (0, 1, signal.SIGKILL)):
        directory = tmp_path / f"{taken} {status} {number.value}"
        directory.mkdir()
        first = subprocess.Popen(["sh", "-c", "exit 1" if status == 1 else "kill -KILL $$"])
        other = subprocess.Popen(["sleep", "100"])
        for rank, process in ((taken, first), (1 - taken, other)):
            start = RankProcess(rank, rank, process.pid, 0, str(directory / f"error{rank}.json"))
            (directory / f"{process.pid}.{STARTED_FILE}").write_text(json.dumps(start._asdict()))
        first.wait()
        with RankWatch(directory, 2, lambda: None) as watch:
            watch._on_child_signal(signal.SIGCHLD, None)
            assert not watch.failed.is_set()
            other.send_signal(number)
            assert watch.failed.wait(20), "of the one that was ended, the news comes in time"
            found = watch.first_failure({first.pid: first.returncode, other.pid: other.wait()})
        assert found is not None
        assert (found[0].rank, found[1]) == (taken, status)


def test_a_crash_in_native_code_shows_where_python_was(tmp_path: Path) -> None:
    status, said = _failing(
        tmp_path,
        """
        import ctypes, os, time
        def touch_null():
            ctypes.string_at(0)
        if os.environ["RANK"] == "0":
            touch_null()
        time.sleep(100)
        """,
    )
    assert status == 128 + 11
    assert re.match(r"zeroshard: rank 0 \(.*\) failed first: killed by signal SIGSEGV", said[0])
    assert any("in touch_null" in line for line in said)


def test_an_exit_status_of_the_script_is_the_launchers(tmp_path: Path) -> None:
    status, said = _failing(
        tmp_path,
        """
        import os, sys, time
        if os.environ["RANK"] == "0":
            sys.exit(3)
        time.sleep(100)
        """,
    )
    assert status == 3
    assert re.match(r"zeroshard: rank 0 \(.*\) failed first: SystemExit: 3", said[0])


def test_a_rank_that_ends_well_before_the_others_is_not_called_dead(tmp_path: Path) -> None:
    status, said = _failing(
        tmp_path,
        """
        import os, sys, time
        rank = int(os.environ["RANK"])
        if rank == 1:
            time.sleep(2.5)
        elif rank == 2:
            sys.exit()
        elif rank == 3:
            os._exit(0)
        """,
        "--nproc",
        "4",
    )
    assert status == 0
    assert said == []


def test_a_rank_that_alone_is_interrupted_is_named_and_not_those_that_are_ended_for_it(tmp_path: Path) -> None:
    status, said = _failing(
        tmp_path,
        """
        import os, signal, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(100)
        """,
    )
    assert status == 128 + signal.SIGINT
    assert re.match(r"zeroshard: rank 1 \(.*\) failed first: KeyboardInterrupt$", said[0])
    assert said[-1] == "zeroshard: ended 1 other rank"


def test_threads_of_a_script_do_not_keep_a_rank_that_has_failed_for_good_but_a_save_may_end(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import sys, threading, time
        from zeroshard.launch import runner

        runner._THREADS_SECONDS = 0.3
        threading.Thread(target=lambda: time.sleep(2) or print("saved", flush=True), name="checkpoint one").start()
        threading.Thread(target=time.sleep, args=(1000,), name="forever").start()
        runner._exit_within_limit(3)
        sys.exit(3)
        """,
    )
    ended = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment({"RANK": "1"}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (3, "saved\n")
    assert "rank 1 has failed and is ended now: 'forever' kept it" in ended.stderr


def test_a_restart_reports_the_failure_it_follows_and_may_end_well(tmp_path: Path) -> None:
    status, said = _failing(
        tmp_path,
        """
        import os, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1":
                raise OSError("only the first time")
            time.sleep(100)
        """,
        "--max-restarts",
        "1",
    )
    assert status == 0
    assert re.match(r"zeroshard: rank 1 \(.*\) failed first: OSError: only the first time", said[0])


def test_the_scripts_own_excepthook_is_called(tmp_path: Path) -> None:
    status, said = _failing(
        tmp_path,
        """
        import os, sys, time
        sys.excepthook = lambda kind, error, trace: print("hook saw", kind.__name__, file=sys.stderr)
        if os.environ["RANK"] == "1":
            raise KeyError("x")
        time.sleep(100)
        """,
    )
    assert status == 1
    assert "hook saw KeyError" in said
