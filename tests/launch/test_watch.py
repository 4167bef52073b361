"""The rank to blame is the one that was killed, however late the news of it comes and whoever takes its status first.

The news is held back on purpose: a process that outlives the rank keeps the rank's end of the socket open.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zeroshard.launch.ends import Ends, Unknown
from zeroshard.launch.watch import Death, RankWatch

_SLEEPER = ("sleep", "100")


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_status_is_known_although_another_part_of_the_process_took_it() -> None:
    children: list[int] = []
    with Ends(lambda: children) as ends:
        killed, left = (subprocess.Popen(words) for words in (_SLEEPER, ("sh", "-c", "exit 7")))
        children += [killed.pid, left.pid]
        assert ends.status(killed.pid) is Unknown.RUNNING
        assert not ends.is_ending(killed.pid)
        killed.kill()
        _until(lambda: killed.poll() == -signal.SIGKILL)  # as the agent does: it asks from time to time
        _until(lambda: left.poll() == 7)
        assert (ends.status(killed.pid), ends.status(left.pid)) == (-signal.SIGKILL, 7)
    never_ours = os.getppid()
    assert ends.status(never_ours) is Unknown.LOST


class _Ranks:
    """Stand-ins for ranks: a process, and the socket on which this test speaks for it."""

    def __init__(self, path: Path, count: int) -> None:
        self.heard: list[tuple[str, int, bool]] = []
        self.watch = RankWatch(
            path,
            announce=lambda death: self._note("told", death),
            died=lambda death: self._note("died", death),
            stopping=lambda number, clear: self.heard.append(("stop", number, clear)),
        )
        self.processes = [subprocess.Popen(_SLEEPER) for _ in range(count)]
        self.lines: list[socket.socket] = []

    def _note(self, what: str, death: Death) -> None:
        self.heard.append((what, death.process.rank, death.violent))

    def greet(self) -> None:
        for rank, process in enumerate(self.processes):
            line = socket.socket(socket.AF_UNIX)
            line.connect(str(self.watch.path))
            self.lines.append(line)
            hello = {"rank": rank, "local_rank": rank, "pid": process.pid, "attempt": 0, "error_file": ""}
            self.say(rank, json.dumps(hello))
        _until(lambda: len(self.watch.processes) == len(self.processes))

    def say(self, rank: int, word: str) -> None:
        self.lines[rank].sendall(word.encode() + b"\n")

    def kill(self, rank: int, reap: bool = True) -> None:
        process = self.processes[rank]
        process.kill()
        if reap:
            _until(lambda: process.poll() is not None)
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        for line in self.lines:
            line.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("reap", [True, False], ids=["reaped", "not reaped"])
def test_a_killed_rank_goes_before_the_peer_that_speaks_first(tmp_path: Path, reap: bool) -> None:
    ranks = _Ranks(tmp_path / "watch", 2)
    with ranks.watch:
        ranks.greet()
        ranks.kill(1, reap)
        ranks.say(0, "failed")
        _until(lambda: any(what == "told" for what, *_ in ranks.heard))
    ranks.end()
    assert ranks.heard == [("died", 0, False), ("died", 1, True), ("told", 1, True)]


def test_a_rank_that_the_agent_ends_is_never_the_first(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path / "watch", 3)
    with ranks.watch:
        ranks.greet()
        ranks.say(0, "failed")
        _until(lambda: any(what == "told" for what, *_ in ranks.heard))
        ranks.kill(1)
        ranks.lines[1].close()
        ranks.say(2, "failed")
    ranks.end()
    assert ranks.heard == [("died", 0, False), ("told", 0, False)]
    first = ranks.watch.conclude({ranks.processes[2].pid: -signal.SIGKILL})
    assert first is not None
    assert first.process.rank == 0


def test_what_had_failed_when_the_agent_is_stopped_is_known_before_the_ranks_are_ended(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path / "watch", 2)
    with ranks.watch:
        ranks.greet()
        ranks.kill(1)
        ranks.watch.stop_ranks()
        ranks.kill(0)
    ranks.end()
    assert ("stop", signal.SIGTERM, False) in ranks.heard
    first = ranks.watch.conclude({})
    assert first is not None
    assert (first.process.rank, first.signal) == (1, signal.SIGKILL)


def test_what_a_rank_has_said_before_the_agent_is_stopped_is_heard(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path / "watch", 2)
    with ranks.watch:
        ranks.greet()
        ranks.say(1, "failed")
        ranks.watch.stop_ranks()
    ranks.end()
    first = ranks.watch.conclude({})
    assert first is not None
    assert (first.process.rank, first.recorded) == (1, True)
    assert ("stop", signal.SIGTERM, False) in ranks.heard


def test_ranks_that_are_well_when_the_agent_is_stopped_have_not_failed(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path / "watch", 2)
    with ranks.watch:
        ranks.greet()
        ranks.watch.stop_ranks()
        ranks.kill(1)
        ranks.lines[1].close()
        ranks.say(0, "failed")
    ranks.end()
    assert ranks.heard == [("stop", signal.SIGTERM, True)]
    assert ranks.watch.conclude({process.pid: -signal.SIGKILL for process in ranks.processes}) is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the end of its socket is all there is")
def test_a_rank_that_closes_what_it_does_not_know_is_not_dead(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path / "watch", 2)
    with ranks.watch:
        ranks.greet()
        ranks.lines[1].close()
        ranks.say(0, "failed")
        _until(lambda: any(what == "told" for what, *_ in ranks.heard))
    ranks.end()
    assert ranks.heard == [("died", 0, False), ("told", 0, False)]


def test_a_rank_that_left_with_status_0_is_not_to_blame_for_what_fails_later(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path / "watch", 2)
    with ranks.watch:
        ranks.processes.append(subprocess.Popen(("sh", "-c", "exit 0")))
        ranks.greet()
        ranks.processes[2].wait()
        ranks.lines[2].close()
        _until(lambda: ranks.processes[2].pid in ranks.watch._ended)
        ranks.say(1, "failed")
        _until(lambda: any(what == "told" for what, *_ in ranks.heard))
    ranks.end()
    assert ranks.heard == [("died", 1, False), ("told", 1, False)]


def test_a_rank_that_is_interrupted_has_failed_unless_all_are(tmp_path: Path) -> None:
    for number, stops in enumerate((False, True)):
        ranks = _Ranks(tmp_path / f"watch{number}", 2)
        with ranks.watch:
            ranks.greet()
            if stops:
                ranks.watch.stop_ranks()
            ranks.say(1, "interrupted")
        ranks.end()
        first = ranks.watch.conclude({})
        assert first is None if stops else first is not None and first.process.rank == 1
