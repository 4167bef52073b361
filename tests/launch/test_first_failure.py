"""The rank to blame is the one that was killed, or failed first, whoever's end the agent sees first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from zeroshard.launch.failures import RankWatch

_SLEEPER = ("sleep", "100")


def _ends(status: int) -> tuple[str, ...]:
    """A rank that ends with a status when it is let go on."""
    return "sh", "-c", f"read line; exit {status}"


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class _Ranks:
    """Stand-ins for ranks: processes, and the files that they would write."""

    def __init__(self, directory: Path, *commands: tuple[str, ...]) -> None:
        self._directory = directory
        self.saving: list[bool] = []
        self.watch = RankWatch(directory, len(commands), lambda: self.saving.append(True))
        self.processes = [
            subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for command in commands
        ]
        for rank, process in enumerate(self.processes):
            start = {"rank": rank, "local_rank": rank, "pid": process.pid, "restart": 0}
            start["error_file"] = str(directory / f"error-{rank}")
            (directory / f"{process.pid}.started.json").write_text(json.dumps(start))

    def record(self, rank: int) -> None:
        """The rank writes what it died of."""
        (self._directory / f"error-{rank}").write_text("")

    def saves(self, rank: int) -> None:
        (self._directory / f"{self.processes[rank].pid}.saves").touch()

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Its status is taken at once, as the agent does."""
        self.processes[rank].send_signal(number)
        _until(lambda: self.processes[rank].poll() is not None)

    def end(self, rank: int) -> None:
        """Let a rank that reads a line go on, and take its status once its end has been told."""
        process = self.processes[rank]
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _until(lambda: process.poll() is not None)

    def first(self) -> tuple[int, int] | None:
        """The first failure when all have ended: rank and status."""
        for process in self.processes:
            process.kill()
            process.wait()
        found = self.watch.first_failure({process.pid: process.returncode for process in self.processes})
        return None if found is None else (found[0].rank, found[1])


def test_a_killed_rank_goes_before_the_peer_that_recorded_an_error_and_ended_first(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path, _ends(1), _SLEEPER)
    with ranks.watch:
        ranks.record(0)
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        os.waitid(os.P_PID, ranks.processes[1].pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has been told
        ranks.end(0)
        assert ranks.first() == (1, -signal.SIGKILL)


def test_of_errors_the_first_that_was_recorded_is_blamed(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path, _SLEEPER, _SLEEPER)
    with ranks.watch:
        ranks.record(1)
        time.sleep(0.02)  # the clock of the file system ticks every 4 ms
        ranks.record(0)
        ranks.kill(0, signal.SIGTERM)
        assert ranks.first() == (1, -signal.SIGKILL), "it ended later, by the hand of the agent"


def test_a_rank_that_failed_and_is_ended_by_the_agent_on_its_way_out_has_status_1(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path, _ends(3), _SLEEPER)
    with ranks.watch:
        ranks.record(1)
        time.sleep(0.02)  # the clock of the file system ticks every 4 ms
        ranks.record(0)
        ranks.end(0)
        ranks.kill(1, signal.SIGTERM)
        assert ranks.first() == (1, 1)


def test_a_rank_that_the_agent_ends_is_never_the_first(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path, _ends(3), _SLEEPER, _SLEEPER)
    with ranks.watch:
        ranks.end(0)
        assert ranks.watch.failed.is_set()
        ranks.kill(1)
        ranks.record(2)
        assert ranks.first() == (0, 3)


def test_what_had_failed_when_the_agent_is_stopped_is_known_and_what_fails_later_is_not(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path, _SLEEPER, _SLEEPER, _SLEEPER)
    with ranks.watch:
        ranks.watch.handle_stops()
        ranks.record(1)
        with pytest.raises(SignalException):
            signal.raise_signal(signal.SIGINT)
        ranks.record(0)
        ranks.kill(0)
        assert ranks.first() == (1, -signal.SIGKILL)
    assert ranks.watch.stopped_by is signal.SIGINT


def test_ranks_that_are_well_when_the_agent_is_stopped_have_not_failed(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path, _SLEEPER, _ends(0))
    with ranks.watch:
        ranks.watch.handle_stops()
        ranks.end(1)
        with pytest.raises(SignalException):
            signal.raise_signal(signal.SIGTERM)
        ranks.record(0)
        assert ranks.first() is None


def test_a_second_signal_kills_what_the_first_did_not_end(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path, ("sh", "-c", "trap '' INT TERM; while :; do sleep 1; done"))
    with ranks.watch:
        ranks.watch.handle_stops()
        with pytest.raises(SignalException):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert ranks.processes[0].wait(timeout=60) == -signal.SIGKILL


def test_sigterm_asks_ranks_to_save_once_if_all_of_them_can(tmp_path: Path) -> None:
    handles = ("sh", "-c", "trap 'exit 0' TERM; echo; while :; do sleep 0.05; done")
    ranks = _Ranks(tmp_path, handles, handles)
    for process in ranks.processes:
        assert process.stdout is not None
        process.stdout.readline()  # it has its trap
    with ranks.watch:
        ranks.watch.handle_stops()
        for rank in range(2):
            ranks.saves(rank)
        signal.raise_signal(signal.SIGTERM)
        assert ranks.saving == [True]
        _until(lambda: ranks.watch.all_ended_well)  # a poll here could reap them before the watch has seen their ends
        assert ranks.watch.asked_to_save


def test_sigterm_stops_ranks_of_which_one_can_not_save(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path, _SLEEPER, _SLEEPER)
    with ranks.watch:
        ranks.watch.handle_stops()
        ranks.saves(0)
        with pytest.raises(SignalException):
            signal.raise_signal(signal.SIGTERM)
        assert not ranks.saving
        assert ranks.first() is None
