"""Decides which nodes train together, as a pure function of the states of all nodes.

    round 0: nodes 0 1 2 3  --node 1 is lost-->  round 1: nodes 0 2 3  --node 4 comes-->  round 2: nodes 0 2 3 4

A round is a set of nodes whose ranks form one process group. It ends within a step when a node is lost (trouble), or
between two steps when the set of nodes is to change (regroup). The next round begins when all remaining nodes of the
last one wait at their gates. It has the nodes of the last round, then those that have waited longest, as many as `most`
and the batch allow; the others are spares.

torch's own dynamic rendezvous was rejected (docs/decisions/0033): it does not know which numbers of ranks a batch
allows, can't be told that a node is lost, and polls once a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """What a node is doing."""

    WAITING = "waiting"
    """All its ranks wait for a round."""
    RUNNING = "running"
    LEAVING = "leaving"
    """Its ranks run, but it asks to leave between two steps."""
    DOWN = "down"
    """Its ranks have ended within a round; it is about to start them again."""
    DONE = "done"
    """All its ranks have ended well."""
    LEFT = "left"
    """It has left the job."""


@dataclass(frozen=True)
class State:
    """The state of a node, which it writes itself.

    Attributes:
        round: the last round in which it was; -1 before the first.
        trouble: why its ranks left that round within a step; "" if they left between two steps.
        died: whether the ranks' processes have ended, so that the state in their memory is lost.
    """

    kind: Kind
    round: int = -1
    trouble: str = ""
    died: bool = False

    def to_text(self) -> str:
        return json.dumps([self.kind.value, self.round, self.trouble, self.died])

    @staticmethod
    def from_text(text: str) -> State:
        kind, number, trouble, died = json.loads(text)
        return State(Kind(kind), number, trouble, died)


@dataclass(frozen=True)
class Round:
    """Nodes that train together, in the order of their ranks.

    Attributes:
        lost: nodes of the round before that are lost, or whose ranks are.
        why: what ended the round before.
    """

    number: int
    nodes: tuple[int, ...]
    lost: tuple[int, ...] = ()
    why: str = ""

    def to_text(self) -> str:
        return json.dumps([self.number, self.nodes, self.lost, self.why])

    @staticmethod
    def from_text(text: str) -> Round:
        number, nodes, lost, why = json.loads(text)
        return Round(number, tuple(nodes), tuple(lost), why)


@dataclass(frozen=True)
class Limits:
    """Limits of the number of nodes, and of waiting.

    Attributes:
        least, most: number of nodes in a round.
        spares: number of further nodes that may wait.
        sizes: the allowed numbers of ranks; None for all.
        lost_after: seconds of silence after which a node is lost.
        last_call: seconds without a new node after which the first round begins with fewer than `most` nodes.
        patience: seconds after which a node ends ranks that have not come to the gate since their round ended.
        timeout: seconds until missing nodes are an error.
    """

    least: int
    most: int
    spares: int = 0
    sizes: tuple[int, ...] | None = None
    lost_after: float = 3.0
    last_call: float = 30.0
    patience: float = 8.0
    timeout: float = 600.0


@dataclass(frozen=True)
class NodeView:
    """A node as another node sees it.

    Attributes:
        alive: whether it has sent a heartbeat lately.
        ranks: number of ranks.
        name: for messages.
    """

    state: State
    alive: bool
    ranks: int
    name: str


class Act(Enum):
    """What is to be done."""

    WAIT = "wait"
    TROUBLE = "trouble"
    REGROUP = "regroup"
    SAVE = "save"
    FORM = "form"
    FINISH = "finish"


@dataclass(frozen=True)
class Decision:
    """What is to be done, and why.

    Attributes:
        nodes: for FORM, the nodes of the next round.
        lost: nodes of the present round that are lost.
    """

    act: Act
    why: str = ""
    nodes: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


_WAIT = Decision(Act.WAIT)


def choose(nodes: Mapping[int, NodeView], former: Sequence[int], limits: Limits) -> tuple[int, ...]:
    """The nodes of the next round, from nodes that wait or will wait; () if there are too few.

    Args:
        former: the nodes of the last round, in its order.
    """
    first = [number for number in former if number in nodes]
    ordered = first + sorted(set(nodes) - set(first))
    for count in range(min(len(ordered), limits.most), limits.least - 1, -1):
        ranks = sum(nodes[number].ranks for number in ordered[:count])
        if limits.sizes is None or ranks in limits.sizes:
            return tuple(ordered[:count])
    return ()


def decide(
    current: Round | None, nodes: Mapping[int, NodeView], limits: Limits, *, quiet_for: float, troubled_for: float
) -> Decision:
    """What the deciding node has to do.

    Args:
        quiet_for: seconds since the last node came.
        troubled_for: seconds since the trouble of the current round began; 0 without trouble.
    """
    waiting = {number: seen for number, seen in nodes.items() if seen.alive and seen.state.kind is Kind.WAITING}
    if current is None:
        chosen = choose(waiting, (), limits)
        full = len(chosen) == limits.most or quiet_for >= limits.last_call
        return Decision(Act.FORM, "", chosen) if chosen and full else _WAIT
    members = {number: nodes[number] for number in current.nodes if number in nodes}
    lost = _lost(current, members)
    running = [number for number, seen in members.items() if number not in lost and _runs(seen, current)]
    if any(seen.state.kind is Kind.DONE for seen in members.values()) and not running:
        return Decision(Act.FINISH, _unfinished(members))
    why = _trouble(current, members, lost)
    if why:
        if running and troubled_for < limits.patience:
            return Decision(Act.TROUBLE, why)
        return _form(waiting, current, limits, why, lost)
    if running:
        return _regroup(current, members, waiting, limits)
    return _form(waiting, current, limits, "nodes come or go", lost)


def _runs(seen: NodeView, current: Round) -> bool:
    """Whether a node is in the round, or about to be: one that still waits has not read it yet."""
    state = seen.state
    if state.kind is Kind.WAITING:
        return state.round < current.number
    return state.kind in (Kind.RUNNING, Kind.LEAVING) and state.round <= current.number


def _lost(current: Round, members: Mapping[int, NodeView]) -> tuple[int, ...]:
    """Members of the round whose ranks are gone but have not ended well."""
    return tuple(
        number
        for number in current.nodes
        if number not in members
        or (not members[number].alive and members[number].state.kind is not Kind.DONE)
        or members[number].state.kind in (Kind.DOWN, Kind.LEFT)
        or (members[number].state.died and not _runs(members[number], current))
    )


def _trouble(current: Round, members: Mapping[int, NodeView], lost: Sequence[int]) -> str:
    """Why the round can't continue; "" if it can. A lost node is named rather than errors that follow from it."""
    for number in lost:
        seen = members.get(number)
        if seen is None:
            return f"node {number} is gone"
        if seen.state.kind is Kind.LEFT and not seen.state.trouble:
            continue  # it left between two steps
        silent = not seen.alive and seen.state.kind in (Kind.RUNNING, Kind.WAITING)
        return f"{seen.name} fell silent" if silent else f"{seen.name}: {seen.state.trouble or 'its ranks have ended'}"
    for seen in members.values():
        if seen.state.kind is Kind.WAITING and seen.state.round == current.number and seen.state.trouble:
            return f"{seen.name}: {seen.state.trouble}"
    return ""


def _unfinished(members: Mapping[int, NodeView]) -> str:
    """Which nodes have not ended well in a job that is over since others have; "" if all have."""
    rest = [
        f"{seen.name} ({seen.state.trouble or 'lost'})" for seen in members.values() if seen.state.kind is not Kind.DONE
    ]
    return f"the job is over since other nodes have ended well, but not {', '.join(rest)}" if rest else ""


def _regroup(
    current: Round, members: Mapping[int, NodeView], waiting: Mapping[int, NodeView], limits: Limits
) -> Decision:
    """Regroup if a node leaves, or if waiting nodes allow more ranks, while the round runs.

    If the others can't go on without the node that leaves, all save and end.
    """
    leaving = [number for number, seen in members.items() if seen.state.kind is Kind.LEAVING]
    staying = {number: seen for number, seen in members.items() if number not in leaving}
    chosen = choose({**staying, **waiting}, current.nodes, limits)
    if leaving:
        return Decision(Act.REGROUP if chosen else Act.SAVE, f"{members[leaving[0]].name} leaves")
    before = sum(seen.ranks for seen in members.values())
    if sum(seen.ranks for number, seen in {**staying, **waiting}.items() if number in chosen) > before:
        new = next(number for number in chosen if number not in current.nodes)
        return Decision(Act.REGROUP, f"{waiting[new].name} joins")
    return _WAIT


def _form(waiting: Mapping[int, NodeView], current: Round, limits: Limits, why: str, lost: tuple[int, ...]) -> Decision:
    chosen = choose(waiting, current.nodes, limits)
    return Decision(Act.FORM, why, chosen, lost) if chosen else Decision(Act.WAIT, why, (), lost)
