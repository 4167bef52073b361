"""Which nodes train together, decided from what is known of all of them: values in, a decision out.

    round 0: nodes 0 1 2 3  --node 1 is lost-->  round 1: nodes 0 2 3  --node 4 comes-->  round 2: nodes 0 2 3 4

A round is a set of nodes whose ranks form one process group. It ends amid a step when a node is lost (trouble), or
between two steps when another set of nodes is wanted (regroup). The next one begins when all who are left of it wait
at their gates. Nodes of the round before go first, then those that have waited longest, as many as `most` and as the
batch allows; what is left over are spares.

torch's own dynamic rendezvous was rejected (docs/decisions/0033): it knows no numbers that a batch allows, can't be
told that a node is lost, and polls by the second.
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
    """It runs, and wants to be let out between two steps."""
    DOWN = "down"
    """Its ranks have ended amid a round; it is about to start them again."""
    DONE = "done"
    """All its ranks have ended well."""
    LEFT = "left"
    """It takes part no more."""


@dataclass(frozen=True)
class State:
    """What a node says of itself.

    Attributes:
        round: the last one that it was in; -1 before the first.
        trouble: why its ranks left that round amid a step; empty where they left between two.
        died: whether they ended as processes, so that what they had in their own memory is gone.
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
        lost: nodes of the round before of which at least the ranks are gone.
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
    """How many nodes there may be, and for how long anybody waits.

    Attributes:
        least, most: nodes in a round.
        spares: nodes beside them that may wait.
        sizes: the numbers of ranks that the batch allows; None for all.
        lost_after: seconds of silence after which a node is lost.
        last_call: seconds without a newcomer after which the first round begins with fewer than `most` nodes.
        patience: seconds that ranks of a round that is over may take to their gate; else their node ends them.
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
class Seen:
    """A node as another one sees it; `name` is for messages."""

    state: State
    alive: bool
    ranks: int
    name: str


class Act(Enum):
    """What is to be done."""

    WAIT = "wait"
    TROUBLE = "trouble"
    REGROUP = "regroup"
    FORM = "form"
    FINISH = "finish"


@dataclass(frozen=True)
class Decision:
    """What is to be done, why, and with which nodes a round is formed."""

    act: Act
    why: str = ""
    nodes: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


_WAIT = Decision(Act.WAIT)


def choose(nodes: Mapping[int, Seen], former: Sequence[int], limits: Limits) -> tuple[int, ...]:
    """The nodes of the next round, of those that wait or soon will; empty where there are too few."""
    first = [number for number in former if number in nodes]
    ordered = first + sorted(set(nodes) - set(first))
    for count in range(min(len(ordered), limits.most), limits.least - 1, -1):
        ranks = sum(nodes[number].ranks for number in ordered[:count])
        if limits.sizes is None or ranks in limits.sizes:
            return tuple(ordered[:count])
    return ()


def decide(
    current: Round | None, nodes: Mapping[int, Seen], limits: Limits, *, quiet_for: float, troubled_for: float
) -> Decision:
    """What the node that leads is to do.

    Args:
        quiet_for: seconds since a node has come.
        troubled_for: seconds since the current round has been in trouble.
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
        return Decision(Act.FINISH)
    why = _trouble(current, members, lost)
    if why:
        if running and troubled_for < limits.patience:
            return Decision(Act.TROUBLE, why)
        return _form(waiting, current, limits, why, lost)
    if running:
        return _regroup(current, members, waiting, limits)
    return _form(waiting, current, limits, "nodes come or go", lost)


def _runs(seen: Seen, current: Round) -> bool:
    """Whether a node is in the round, or about to be: one that waits has not heard of it yet."""
    state = seen.state
    if state.kind is Kind.WAITING:
        return state.round < current.number
    return state.kind in (Kind.RUNNING, Kind.LEAVING) and state.round <= current.number


def _lost(current: Round, members: Mapping[int, Seen]) -> tuple[int, ...]:
    """Members of the round whose ranks are gone without having ended well."""
    return tuple(
        number
        for number in current.nodes
        if number not in members
        or (not members[number].alive and members[number].state.kind is not Kind.DONE)
        or members[number].state.kind in (Kind.DOWN, Kind.LEFT)
        or (members[number].state.died and not _runs(members[number], current))
    )


def _trouble(current: Round, members: Mapping[int, Seen], lost: Sequence[int]) -> str:
    """Why the round can't go on; empty where it can. What has died outright goes before what follows from it."""
    for number in lost:
        seen = members.get(number)
        if seen is None:
            return f"node {number} is gone"
        if seen.state.kind is Kind.LEFT and not seen.state.trouble:
            continue  # it was let out between two steps
        silent = not seen.alive and seen.state.kind in (Kind.RUNNING, Kind.WAITING)
        return f"{seen.name} fell silent" if silent else f"{seen.name}: {seen.state.trouble or 'its ranks have ended'}"
    for seen in members.values():
        if seen.state.kind is Kind.WAITING and seen.state.round == current.number and seen.state.trouble:
            return f"{seen.name}: {seen.state.trouble}"
    return ""


def _regroup(current: Round, members: Mapping[int, Seen], waiting: Mapping[int, Seen], limits: Limits) -> Decision:
    """Whether other nodes are wanted while the round runs."""
    leaving = [number for number, seen in members.items() if seen.state.kind is Kind.LEAVING]
    staying = {number: seen for number, seen in members.items() if number not in leaving}
    chosen = choose({**staying, **waiting}, current.nodes, limits)
    if leaving:
        return Decision(Act.REGROUP, f"{members[leaving[0]].name} leaves")
    before = sum(seen.ranks for seen in members.values())
    if sum(seen.ranks for number, seen in {**staying, **waiting}.items() if number in chosen) > before:
        new = next(number for number in chosen if number not in current.nodes)
        return Decision(Act.REGROUP, f"{waiting[new].name} joins")
    return _WAIT


def _form(waiting: Mapping[int, Seen], current: Round, limits: Limits, why: str, lost: tuple[int, ...]) -> Decision:
    chosen = choose(waiting, current.nodes, limits)
    return Decision(Act.FORM, why, chosen, lost) if chosen else Decision(Act.WAIT, why, (), lost)
