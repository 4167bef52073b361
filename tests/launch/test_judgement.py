"""Messages survive any cut of the stream they travel in, and of several troubles the first is blamed."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.launch import frames
from zeroshard.launch.arbiter import Arbiter


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
    arbiter = Arbiter()
    for kind, node, when in events:
        if kind == "gone":
            arbiter.gone(node, f"node {node} is lost", when)
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


def test_a_lost_node_or_a_killed_rank_goes_before_the_errors_it_causes() -> None:
    errors = [("died", 0, 0.0), ("cause", 0, 0.0)]
    assert _told(*errors, ("gone", 1, 0.3), ("other", 2, 2.0)) == "node 1 is lost"
    assert _told(*errors, ("killed", 1, 0.3), ("cause", 1, 2.0)) == "node 1 failed"
    assert _told(*errors, ("killed", 1, 1.3), ("cause", 1, 2.0)) == "node 0 failed", "too late to be the cause"
    assert _told(*errors, ("gone", 1, 1.3), ("other", 2, 2.0)) == "node 0 failed"
