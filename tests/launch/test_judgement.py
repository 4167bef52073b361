"""Messages survive any cut of the stream they travel in, and of several troubles the first is blamed."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.launch import frames
from zeroshard.launch.arbiter import Arbiter
from zeroshard.launch.line import Judge
from zeroshard.launch.voice import ToLauncher


def _stream(messages: list[frames.Message]) -> bytes:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as end:
        for message in messages:
            os.write(write, b"plain\x1e text, no newline")
            frames.send(message, write)
        os.close(write)
        return end.read()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=9000), max_size=3), st.lists(st.integers(1, 4000), min_size=1, max_size=8))
def test_messages_and_plain_text_come_apart_wherever_the_stream_is_cut(texts: list[str], cuts: list[int]) -> None:
    messages = [{"kind": "cause", "text": text} for text in texts]
    stream = _stream(messages)
    decoder = frames.Decoder()
    plain, heard, place = b"", [], 0
    while place < len(stream):
        size = cuts[place % len(cuts)]
        shown, found = decoder.feed(stream[place : place + size])
        plain, heard, place = plain + shown, heard + found, place + size
    assert heard == messages
    assert plain + decoder.rest() == b"plain\x1e text, no newline" * len(messages)


def _told(*events: tuple[str, int, float]) -> str | None:
    arbiter = Arbiter(nodes=2)
    for kind, node, when in events:
        if kind == "gone":
            arbiter.gone(node, f"node {node} is lost", when)
        elif kind == "clear":
            arbiter.clear(node)
        elif kind == "cause":
            arbiter.cause(node, f"node {node} failed")
        else:
            arbiter.died(node, when, violent=kind == "killed")
    return arbiter.verdict(max(when for *_, when in events), final=False)


def test_the_first_death_is_the_cause() -> None:
    events = [("died", 1, 0.0), ("died", 0, 0.1), ("cause", 0, 0.2)]
    assert _told(*events, ("cause", 1, 0.5)) is None, "something that goes before it may still come"
    assert _told(*events, ("cause", 1, 1.5)) == "node 1 failed"
    assert _told(*events, ("other", 2, 2.0)) is None, "it has not said why yet"
    assert "did not say why" in str(_told(*events, ("other", 2, 20.0)))


def test_a_lost_node_or_a_killed_rank_goes_before_the_errors_it_causes_however_late_the_news() -> None:
    errors = [("died", 0, 0.0), ("cause", 0, 0.0)]
    for late in (0.3, 9.0):
        assert _told(*errors, ("gone", 1, late), ("other", 2, late + 2)) == "node 1 is lost"
        assert _told(*errors, ("killed", 1, late), ("cause", 1, late + 2)) == "node 1 failed"


def test_an_error_is_not_the_cause_before_every_node_has_looked_at_its_ranks() -> None:
    errors = [("died", 0, 0.0), ("cause", 0, 0.0)]
    assert _told(*errors, ("other", 1, 9.0)) is None
    assert _told(*errors, ("clear", 1, 2.0)) == "node 0 failed"
    assert _told(*errors, ("other", 1, 16.0)) == "node 0 failed", "a node that does not answer holds up nothing"


def test_what_befalls_a_node_that_had_been_clear_follows_from_the_errors() -> None:
    errors = [("died", 0, 0.0), ("cause", 0, 0.0), ("clear", 1, 0.2)]
    assert _told(*errors, ("killed", 1, 1.3), ("cause", 1, 2.0)) == "node 0 failed"
    assert _told(*errors, ("gone", 1, 1.3), ("other", 2, 2.0)) == "node 0 failed"


class _Node:
    """A node's end of the line to the judge."""

    def __init__(self, judge: Judge, number: int) -> None:
        port, token = judge.address.split()
        self._connection = socket.create_connection(("localhost", int(port)), timeout=10)
        self.say({"kind": "hello", "token": token, "node": number, "host": f"h{number}"})

    def say(self, message: frames.Message) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def hears(self) -> list[frames.Message]:
        """All up to the cause."""
        heard: list[frames.Message] = []
        with self._connection.makefile() as lines:
            for line in lines:
                heard.append(json.loads(line))
                if heard[-1]["kind"] == "cause":
                    break
        return heard

    def vanish(self) -> None:
        self._connection.close()


def test_nodes_hear_of_the_first_trouble_and_strangers_are_not_heard() -> None:
    judge = Judge(3)
    nodes = [_Node(judge, number) for number in range(3)]
    for garbage in (
        b'{"kind": "died", "violent": true}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"kind": "hello"}\n',
        b"[1]\n",
    ):
        with socket.create_connection(("localhost", int(judge.address.split()[0])), timeout=10) as stranger:
            stranger.sendall(garbage)
            assert stranger.recv(100) == b"", "hung up on"
    nodes[2].say({"kind": "died", "rank": 7, "violent": False})
    nodes[2].say({"kind": "cause", "text": "rank 7 lost a peer"})
    nodes[1].vanish()
    told = "zeroshard: node 1 (host h1) was lost first: its agent ended without a word"
    for node in (nodes[0], nodes[2]):
        *_, last = node.hears()
        assert (last["node"], last["text"]) == (1, told)
        node.vanish()
    judge.close(well=False)


def test_a_node_that_is_through_may_leave() -> None:
    judge = Judge(2)
    nodes = [_Node(judge, number) for number in range(2)]
    nodes[1].say({"kind": "bye"})
    nodes[1].vanish()
    nodes[0].say({"kind": "bye"})
    deadline = time.monotonic() + 10
    while len(judge._peers) != 1 and time.monotonic() < deadline:  # both were heard, and one has left
        time.sleep(0.01)
    judge.close(well=True)
    assert nodes[0].hears() == [{"kind": "bye"}]


def test_a_node_that_is_stopped_for_what_its_own_rank_began_ends_with_the_status_of_that_rank() -> None:
    assert ToLauncher().stopped(signal.SIGTERM, failed=137) == 137
    assert ToLauncher().stopped(signal.SIGTERM, failed=None) == 128 + signal.SIGTERM
