"""SIGKILL of one or all ranks at random instants of steps and saves: the newest checkpoint is always whole.

Each case lets the ranks train and save after every step, kills one or all of them at a random time, looks at the
directory, and starts them anew on what is there, until the last step is reached. Losses must be those of a run that
nobody killed: what was drawn at random, moments and counters included. ZEROSHARD_KILLS=200 runs as many cases,
ZEROSHARD_KILLS_ENCRYPTED=1 encrypts the checkpoints. ZEROSHARD_KILL_PIECES=4 makes four trainings of it, with a quarter
of the kills each and other moments, which `pytest -n 4` runs beside each other.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.support.kill_loop import train
from zeroshard.checkpoint.directory import find, whole
from zeroshard.checkpoint.keys import ENVIRONMENT, new_key_file
from zeroshard.checkpoint.reader import CheckpointReader

PIECES = int(os.environ.get("ZEROSHARD_KILL_PIECES", "1"))
KILLS = -(-int(os.environ.get("ZEROSHARD_KILLS", "8")) // PIECES)
STEPS = 4 * KILLS
ENCRYPTED = os.environ.get("ZEROSHARD_KILLS_ENCRYPTED") == "1"
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "zeroshard", "tests.support.kill_loop"])


def _start(base: Path, ranks: int, steps: int) -> list[BaseProcess]:
    store = tempfile.mktemp(prefix="store-", dir=base)
    processes = [
        _CONTEXT.Process(
            target=train, args=(rank, ranks, str(base), store, steps, 0.0, os.environ.get(ENVIRONMENT)), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def _losses(base: Path, ranks: int) -> dict[tuple[int, int], set[str]]:
    """What each rank's loss was at each step, in every life in which it came there."""
    found: dict[tuple[int, int], set[str]] = {}
    for rank in range(ranks):
        file = base / f"log-{rank}"
        for line in file.read_text().splitlines() if file.exists() else ():
            words = line.split()
            if len(words) == 2:
                found.setdefault((rank, int(words[0])), set()).add(words[1])
    return found


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def _lines(log: Path) -> int:
    return log.read_text().count("\n") if log.exists() else 0


def _kill_case(base: Path, ranks: int, chance: random.Random, log: Path, steps: int) -> None:
    # Some way into one of the first steps of this life, however long a step takes on this machine.
    wanted = _lines(log) + chance.randint(1, 3)
    processes = _start(base, ranks, steps)
    limit = time.monotonic() + 60
    while processes[0].is_alive() and time.monotonic() < limit:
        if _lines(log) >= wanted:
            break
        time.sleep(0.002)
    time.sleep(chance.random() * 0.05)
    victims = processes if chance.random() < 0.5 else [chance.choice(processes)]
    for process in victims:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.01)
    _end(processes)  # the others would find out by themselves, seconds later


@pytest.mark.timeout(max(300, 60 * KILLS))
@pytest.mark.parametrize("piece", range(PIECES))
def test_whoever_is_killed_whenever_the_newest_checkpoint_is_whole_and_the_run_goes_on_the_same(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, chance = 2, random.Random(int(os.environ.get("ZEROSHARD_KILL_SEED", "1")) + piece)
    base, calm = tmp_path / "killed", tmp_path / "calm"
    base.mkdir()
    calm.mkdir()
    if ENCRYPTED:
        new_key_file(tmp_path / "key")
        monkeypatch.setenv(ENVIRONMENT, f"file:{tmp_path / 'key'}")
    newest = 0
    for case in range(KILLS):
        _kill_case(base, ranks, chance, base / "log-0", STEPS)
        if not whole(base):
            assert newest == 0, f"case {case}: no checkpoint is left"
            continue
        for found in whole(base):
            with CheckpointReader(found.folder) as reader:
                assert reader.verify() == [], f"case {case}"
                assert (reader.manifest.encryption is not None) == ENCRYPTED, f"case {case}"
        with CheckpointReader(find(base)) as reader:
            step = int(reader.state["counters"]["global_steps"])
        assert step >= newest, f"case {case}: the newest checkpoint is of step {step}, there was one of {newest}"
        newest = step
    reached = max(step for _, step in _losses(base, ranks)) + 1
    processes = _start(calm, ranks, reached)
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    expected = _losses(calm, ranks)
    for place, seen in _losses(base, ranks).items():
        assert seen == expected[place], place
    assert newest > 3
