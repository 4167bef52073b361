"""Nodes of a job end together and tell the same first cause; messages come out of the stream in which they travel."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.launcher import environment
from tests.support import forked
from zeroshard.launch import messages
from zeroshard.launch.channel import Channel
from zeroshard.launch.starters import StarterOptions

# One node: `how`, and seconds until its part has ended by itself; then what it tells, and its status.
_NODE = """
import json, os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
import threading
from zeroshard.launch import peers
from zeroshard.launch.job import Job
from zeroshard.launch.peers import Ending, EndKind, Peers

rank, count, port, how, seconds, ssh = json.loads(sys.argv[1])
peers._SILENT_SECONDS, peers._SILENT_IN_TROUBLE_SECONDS, peers._HEARTBEAT_SECONDS = 4.0, 3.0, 0.2
watch = SimpleNamespace(failed=threading.Event(), stopped_by=None, ended_by_peer=False, all_ended_well=False)
watch.handles_stops = how != "starting"
class Ended(Exception): pass
def ended(number, frame): raise Ended
if watch.handles_stops: signal.signal(signal.SIGTERM, ended)
place = dict(node_rank=rank, node_name=f"h{rank}", master_addr="localhost", master_port=port)
job = Job("t", nnodes=count, over_ssh=ssh, **place)
us = Peers(job, watch)
us._store.add("here", 1)
while us._store.add("here", 0) < count: time.sleep(0.01)
try:
    time.sleep(seconds)
    if how == "lost": os._exit(9)
    if how != "ended": watch.failed.set()
    ending = Ending(EndKind(how), 0 if how == "ended" else 7, "" if how == "ended" else f"zeroshard: rank {rank} {how}")
except Ended:
    killed = Ending(EndKind.KILLED, 7, f"zeroshard: rank {rank} killed")
    ending = killed if how == "killed" else Ending(EndKind.ENDED, 1)
print("status", us.conclude(ending))
"""


@dataclass
class _Told:
    lines: list[str]
    status: int


def _job(directory: Path, *parts: tuple[str, float], over_ssh: bool = False) -> list[_Told]:
    """What each node of a job tells, by how and when its part ends."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    nodes = [
        forked.start(
            ["-c", _NODE, json.dumps([rank, len(parts), port, how, seconds, over_ssh])], directory, environment()
        )
        for rank, (how, seconds) in enumerate(parts)
    ]
    told: list[_Told] = []
    for node in nodes:
        out, err = node.communicate(timeout=120)
        lines = [line for line in err.split("\n") if "zeroshard" in line and "c10d" not in line]
        told.append(_Told(lines, int(out.split()[1]) if out else node.returncode))
    return told


def test_the_first_failure_is_told_by_every_node_and_ends_those_that_are_well(tmp_path: Path) -> None:
    first, second, third = _job(tmp_path, ("failed", 1.0), ("failed", 0.2), ("ended", 100.0))
    assert second.lines == ["zeroshard: rank 1 failed"]
    assert first.lines[0] == "zeroshard: rank 1 failed"
    assert third.lines == ["zeroshard: rank 1 failed", "zeroshard: ended the ranks of this node"]
    assert (second.status, third.status) == (7, 1)


def test_a_rank_that_was_killed_goes_before_the_errors_it_causes_however_late_the_news(tmp_path: Path) -> None:
    first, second = _job(tmp_path, ("failed", 0.0), ("killed", 100.0))
    assert second.lines == ["zeroshard: rank 1 killed", "zeroshard: ended the ranks of this node"]
    assert first.lines == ["zeroshard: rank 1 killed", "zeroshard: then rank 0 failed"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_node_that_is_lost_goes_before_the_errors_it_causes(tmp_path: Path, place: int) -> None:
    parts = [("failed", 0.5), ("failed", 0.5)]
    parts[place] = ("lost", 0.2)
    other = _job(tmp_path, *parts)[1 - place]
    assert other.lines[0] == (
        f"zeroshard: node {place} (host {'h1' if place else 'localhost'}) was lost first: it fell silent"
    )
    assert other.status


def test_a_silent_node_ends_those_that_would_wait_for_it(tmp_path: Path) -> None:
    first, _ = _job(tmp_path, ("ended", 100.0), ("lost", 0.1))
    assert first.lines == [
        "zeroshard: node 1 (host h1) was lost first: it fell silent",
        "zeroshard: ended the ranks of this node",
    ]


def test_a_node_that_has_started_no_ranks_yet_ends_with_an_error_and_not_as_if_it_was_killed(tmp_path: Path) -> None:
    first, second = _job(tmp_path, ("starting", 100.0), ("failed", 0.1))
    assert first.status == 1
    assert first.lines[0] == "zeroshard: rank 1 failed"
    assert second.status == 7


def test_nodes_that_end_well_at_different_times_have_nothing_to_tell(tmp_path: Path) -> None:
    assert _job(tmp_path, ("ended", 0.0), ("ended", 1.5)) == [_Told([], 0), _Told([], 0)]


def test_under_a_launcher_the_node_to_blame_alone_tells_why(tmp_path: Path) -> None:
    first, second, third = _job(tmp_path, ("failed", 0.1), ("killed", 0.1), ("ended", 100.0), over_ssh=True)
    assert first.lines[0] == "zeroshard: then rank 0 failed"
    said, text = second.lines[:2]
    assert messages.split_message(said.encode()) == (b"", {"kind": "first"})
    assert text == "zeroshard: rank 1 killed"
    assert third.lines == ["zeroshard: ended the ranks of this node"]


def test_messages_come_apart_from_text_wherever_the_stream_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    saved = os.dup(2)
    os.dup2(write, 2)
    os.write(2, b"step 3")
    messages.send(kind="left", status=5)
    os.write(2, b"bar 1%\rbar 2%\r")
    messages.send(kind="saving")
    os.write(2, b"end")
    os.dup2(saved, 2)
    os.close(write)
    stream = os.read(read, 65536)
    (tmp_path / "ssh").write_text(f"#!/bin/sh\nread line; exec {sys.executable} {tmp_path}/say\n")
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "say").write_text(
        f"import os, sys, time\nfor byte in {stream!r}:\n    os.write(2, bytes([byte]))\n    time.sleep(0.0005)\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    channel = Channel("h", StarterOptions(), {})
    channel.answered = True
    heard: list[messages.Message] = []
    errors = channel.streams()[1]
    while True:
        found, more = channel.read(errors)
        heard += found
        if not more:
            break
    channel.kill()
    assert heard == [{"kind": "left", "status": 5}, {"kind": "saving"}]
    assert capfd.readouterr().err == "h: step 3\nh: bar 1%\rh: bar 2%\rh: end\n"
