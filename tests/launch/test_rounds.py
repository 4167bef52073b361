"""Which nodes of an elastic job train together: each loss, each arrival, and what is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from zeroshard.errors import UsageError
from zeroshard.launch.elastic.membership import Membership, Node
from zeroshard.launch.elastic.rounds import Act, Decision, Kind, Limits, NodeView, Round, State, choose, decide

_LIMITS = Limits(least=2, most=3, last_call=10.0)
_FIRST = Round(0, (0, 1, 2))


def _seen(kind: Kind, number: int = 0, *, alive: bool = True, trouble: str = "", died: bool = False) -> NodeView:
    return NodeView(State(kind, number, trouble, died), alive, ranks=2, name="host h")


def _decide(
    nodes: dict[int, NodeView], current: Round | None = _FIRST, quiet: float = 0.0, troubled: float = 0.0
) -> Decision:
    return decide(current, nodes, _LIMITS, quiet_for=quiet, troubled_for=troubled)


def test_the_first_round_waits_for_all_nodes_or_for_the_last_call() -> None:
    two = {number: _seen(Kind.WAITING, -1) for number in range(2)}
    assert _decide(two, None).act is Act.WAIT
    assert _decide(two, None, quiet=10.0).nodes == (0, 1)
    assert _decide({**two, 5: _seen(Kind.WAITING, -1)}, None).nodes == (0, 1, 5)
    assert _decide({0: _seen(Kind.WAITING, -1)}, None, quiet=99.0).act is Act.WAIT


@pytest.mark.parametrize(
    "lost",
    [
        _seen(Kind.RUNNING, alive=False),
        _seen(Kind.WAITING, alive=False),
        _seen(Kind.DOWN, died=True),
        _seen(Kind.LEFT, trouble="failed again and again"),
    ],
)
def test_a_lost_node_ends_the_round_and_the_rest_go_on_when_they_have_come_out_of_it(lost: NodeView) -> None:
    running = {0: _seen(Kind.RUNNING), 1: lost, 2: _seen(Kind.RUNNING)}
    assert _decide(running).act is Act.TROUBLE
    assert _decide({**running, 0: _seen(Kind.WAITING)}).act is Act.TROUBLE
    formed = _decide({**running, 0: _seen(Kind.WAITING), 2: _seen(Kind.WAITING)})
    assert (formed.act, formed.nodes, formed.lost) == (Act.FORM, (0, 2), (1,))


def test_a_node_that_does_not_come_out_of_a_lost_round_is_left_behind_after_a_while() -> None:
    nodes = {0: _seen(Kind.WAITING, trouble="rank 5 is gone"), 1: _seen(Kind.WAITING), 2: _seen(Kind.RUNNING)}
    assert _decide(nodes).act is Act.TROUBLE
    assert _decide(nodes, troubled=99.0).nodes == (0, 1)


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    nodes = {0: _seen(Kind.WAITING), 1: _seen(Kind.WAITING), 2: _seen(Kind.RUNNING, alive=False)}
    assert _decide({**nodes, 7: _seen(Kind.WAITING, -1)}).nodes == (0, 1, 7)


def test_a_round_that_has_begun_waits_for_members_that_have_not_heard_of_it() -> None:
    nodes = {0: _seen(Kind.RUNNING, 1), 1: _seen(Kind.WAITING, 0), 2: _seen(Kind.WAITING, 0)}
    assert _decide(nodes, Round(1, (0, 1, 2))).act is Act.WAIT


def test_a_node_that_comes_is_taken_in_between_two_steps_and_one_too_many_waits() -> None:
    running = {0: _seen(Kind.RUNNING), 1: _seen(Kind.RUNNING)}
    new = {4: _seen(Kind.WAITING, -1)}
    assert _decide({**running, **new}, Round(0, (0, 1))).act is Act.REGROUP
    out = {number: _seen(Kind.WAITING) for number in running}
    assert _decide({**out, **new}, Round(0, (0, 1))).nodes == (0, 1, 4)
    full = {**running, 2: _seen(Kind.RUNNING)}
    assert _decide({**full, **new}).act is Act.WAIT


def test_a_node_that_leaves_is_let_out_between_two_steps_without_trouble() -> None:
    nodes = {0: _seen(Kind.RUNNING), 1: _seen(Kind.LEAVING), 2: _seen(Kind.RUNNING)}
    assert _decide(nodes).act is Act.REGROUP
    formed = _decide({0: _seen(Kind.WAITING), 1: _seen(Kind.LEFT), 2: _seen(Kind.WAITING)})
    assert (formed.act, formed.nodes) == (Act.FORM, (0, 2))


def test_all_save_if_the_others_cannot_go_on_without_a_node_that_leaves() -> None:
    nodes = {0: _seen(Kind.RUNNING), 1: _seen(Kind.LEAVING)}
    assert _decide(nodes, Round(0, (0, 1))).act is Act.SAVE
    assert _decide({**nodes, 2: _seen(Kind.WAITING, -1)}, Round(0, (0, 1))).act is Act.REGROUP, "a spare"
    both = {**nodes, 0: _seen(Kind.LEAVING)}
    assert _decide(both, Round(0, (0, 1))).act is Act.SAVE


def test_only_numbers_of_ranks_that_the_batch_allows_are_formed() -> None:
    nodes = {number: _seen(Kind.WAITING) for number in range(4)}
    limits = replace(_LIMITS, most=4, sizes=(4, 8))
    assert choose(nodes, (3, 1), limits) == (3, 1, 0, 2)
    del nodes[0]
    assert choose(nodes, (3, 1), limits) == (3, 1)
    assert choose({1: nodes[1]}, (3, 1), limits) == ()


def test_the_job_is_over_when_its_ranks_have_ended_well() -> None:
    nodes = {0: _seen(Kind.DONE), 1: _seen(Kind.DONE, alive=False), 2: _seen(Kind.RUNNING)}
    assert _decide(nodes).act is Act.WAIT
    assert _decide({**nodes, 2: _seen(Kind.DONE)}) == Decision(Act.FINISH)


def test_nodes_that_have_not_ended_well_when_the_job_is_over_are_named() -> None:
    nodes = {0: _seen(Kind.DONE), 1: _seen(Kind.WAITING, trouble="rank 2: no"), 2: _seen(Kind.RUNNING, alive=False)}
    over = "the job is over since other nodes have ended well, but not host h (rank 2: no), host h (lost)"
    assert _decide(nodes) == Decision(Act.FINISH, over)


class _Ranks:
    """A node's ranks that obey: a listener whose ranks are at the gate at once."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.ends: list[tuple[int, str]] = []
        self.reminders: list[str] = []
        self.membership: Membership | None = None

    def join(self, port: int, limits: Limits) -> _Ranks:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.membership = Membership(store, Node("host h", 2, "127.0.0.1", 0), limits, self)
        self.membership.enter()
        self.membership.set_state(State(Kind.WAITING))
        return self

    def serve_round(self, begun: Round, nodes: dict[int, Node]) -> int:
        return 1000 + begun.number

    def round_begins(self, begun: Round, nodes: dict[int, Node], alive: set[int], port: int) -> None:
        assert port == 1000 + begun.number
        self.rounds.append(begun)

    def trouble(self, number: int, why: str) -> None:
        self._out(number)

    def save(self, number: int, why: str) -> None:
        pass

    def can_save(self) -> bool:
        return False

    def regroup(self, number: int, why: str) -> None:
        self._out(number)

    def _out(self, number: int) -> None:
        assert self.membership is not None
        self.membership.set_state(State(Kind.WAITING, number))

    def waits(self, why: str) -> None:
        self.reminders.append(why)

    def over(self, status: int, why: str) -> None:
        self.ends.append((status, why))

    def vanish(self) -> None:
        """As a host that has lost its power."""
        assert self.membership is not None
        self.membership._over.set()


def _until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 20.0
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def _join_threads() -> None:
    """Wait for the memberships' threads, before their store is closed."""
    for thread in threading.enumerate():
        if thread.name.startswith("membership"):
            thread.join(5.0)


def test_nodes_agree_on_rounds_through_the_store_when_one_is_lost_and_others_come() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limits = replace(_LIMITS, lost_after=1.0)
    nodes = [_Ranks().join(store.port, limits) for _ in range(3)]
    _until(lambda: all(len(node.rounds) == 1 for node in nodes))
    nodes[0].vanish()  # it has led
    _until(lambda: all(len(node.rounds) == 2 for node in nodes[1:]))
    assert [node.rounds[1].nodes for node in nodes[1:]] == [(1, 2), (1, 2)]
    assert nodes[1].rounds[1].why == "host h fell silent"
    new = _Ranks().join(store.port, limits)
    _until(lambda: all(node.rounds and node.rounds[-1].nodes == (1, 2, 3) for node in (*nodes[1:], new)))
    late = _Ranks().join(store.port, limits)
    _until(lambda: bool(late.ends))
    assert late.ends == [(2, "the job has its 3 nodes and 0 spares already")]
    for node in (*nodes[1:], new):
        assert node.membership is not None
        node.membership.set_state(State(Kind.DONE, 2))
    _until(lambda: all(node.ends == [(0, "")] for node in (*nodes[1:], new)))
    _join_threads()


def test_a_node_that_waits_for_others_says_how_many_are_here_and_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.launch.elastic.membership._REMINDER_SECONDS", 0.3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    node = _Ranks().join(store.port, replace(_LIMITS, sizes=(4, 6), timeout=1.0))
    _until(lambda: bool(node.ends))
    needed = "the job needs 2 to 3 nodes, with 4, 6 ranks in all (--elastic)"
    assert node.reminders[0] == f"1 node with 2 ranks waited for others for 0 s; {needed}; an error after 1 s " + (
        "(--rendezvous-timeout)"
    )
    assert node.ends == [(1, f"1 node with 2 ranks waited for others for 1 s; {needed}")]
    _join_threads()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"least": 1}, "--nodes 1:3: the job's first node has --nodes 2:3"),
        ({"spares": 1}, "--spares 1: the job's first node has --spares 0"),
        ({"sizes": (2, 4)}, "config allows 2, 4 ranks, that of the job's first node any number of ranks"),
    ],
)
def test_a_node_with_other_numbers_than_the_first_is_refused(other: dict[str, Any], message: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = _Ranks().join(store.port, _LIMITS)
    with pytest.raises(UsageError, match=message):
        _Ranks().join(store.port, replace(_LIMITS, **other))
    _Ranks().join(store.port, replace(_LIMITS, lost_after=1.0)).vanish()
    first.vanish()
    _join_threads()


def test_a_second_job_at_the_rendezvous_of_one_that_has_ended_is_refused() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.PrefixStore("zeroshard/elastic", store).set("end", '[0, ""]')
    with pytest.raises(UsageError, match="has ended, and a rendezvous serves one job"):
        _Ranks().join(store.port, _LIMITS)
