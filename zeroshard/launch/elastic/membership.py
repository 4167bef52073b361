"""This node among all nodes of an elastic job, through one store: it beats, says what it does, hears what is decided.

    joined          0,1,2,            numbers of nodes in the order in which they came
    node/1          name, ranks       what stays as it is
    state/1         running, 0, ...   what the node does (rounds.State)
    beat/1          42                counted on all the time: silence is loss
    trouble/0       why               round 0 can't go on; its ranks go to their gates
    regroup/0       why               round 0 ends between two steps
    round/1         0,2               who is in round 1; whoever writes it first has decided

The node with the lowest number that lives leads: it decides by `rounds.decide` and writes it down. Two that both think
so do no harm, since the first one who writes `round/1` has written it. Rejected: a leader that is elected, which has to
be found lost before anything is decided, and callbacks between nodes, which need a port on each.

The store is torch's TCPStore, served by the node whose address was given, or by `zeroshard rendezvous` on a host of its
own. It is the one thing that must not be lost.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from zeroshard.errors import UsageError
from zeroshard.launch.elastic.rounds import Act, Decision, Kind, Limits, Round, Seen, State, decide
from zeroshard.launch.report import one_line

TICK_SECONDS = 0.1
_PREFIX = "zeroshard/elastic"
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Node:
    """What a node says of itself when it comes: its name for people, and where it gives out the memory it holds."""

    name: str
    ranks: int
    address: str
    port: int

    def to_text(self) -> str:
        return json.dumps([self.name, self.ranks, self.address, self.port])

    @staticmethod
    def from_text(text: str) -> Node:
        return Node(*json.loads(text))


class Listener(Protocol):
    """Who hears what was decided; called in the thread of the membership."""

    def serve_round(self, begun: Round, nodes: dict[int, Node]) -> int:
        """This node is the first of a round: it serves the store in which the ranks meet; the port."""
        ...

    def round_begins(self, begun: Round, nodes: dict[int, Node], alive: set[int], port: int) -> None:
        """This node is in it. `nodes` are all that have ever come, `alive` those of which something is heard."""
        ...

    def trouble(self, number: int, why: str) -> None:
        """Round `number`, in which this node is, can't go on."""
        ...

    def regroup(self, number: int, why: str) -> None:
        """Round `number` is to end between two steps."""
        ...

    def over(self, status: int, why: str) -> None:
        """The job is over for this node."""
        ...


def connect(address: str, port: int, timeout: float) -> dist.TCPStore:
    """The store of a job; served here where the address is this host's and nobody listens there yet.

    Raises:
        UsageError: nobody serves it in time.
    """
    limit = timedelta(seconds=timeout)
    if _is_here(address):
        with suppress(dist.DistError):  # the port is taken: by the rendezvous, or by another node of this host
            return dist.TCPStore(address, port, is_master=True, timeout=limit, wait_for_workers=False)
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
    except dist.DistError as error:
        raise UsageError(f"the nodes did not meet at {address}:{port}: {one_line(str(error))}") from error


def _is_here(address: str) -> bool:
    """Whether an address is one of this host's."""
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def status_of_job(store: dist.Store) -> int | None:
    """The status with which the job of a store has ended; None while it goes on."""
    job = dist.PrefixStore(_PREFIX, store)
    return json.loads(job.get("end"))[0] if job.check(["end"]) else None


class Membership:
    """This node in its job; `enter` begins it. Methods are called from any thread.

    Attributes:
        number: this node's, known after `enter`.
        token: what nodes of this job show each other, known after `enter`.
    """

    def __init__(self, store: dist.Store, own: Node, limits: Limits, listener: Listener) -> None:
        self._store = dist.PrefixStore(_PREFIX, store)
        self._own, self._limits, self._listener = own, limits, listener
        self.number, self.token = -1, ""
        self._lock = threading.Lock()
        self._state = State(Kind.DOWN)
        self._told: State | None = None
        self._nodes: dict[int, Node] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._newest: Round | None = None
        self._heard: set[tuple[str, int]] = set()
        self._newcomer_at = self._waits_since = self._entered_at = time.monotonic()
        self._trouble_since: float | None = None
        self._answered_at = time.monotonic()
        self._over, self._woken = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"membership-{name}", daemon=True)
            for name, work in (("rounds", self._run), ("answers", self._await_answers))
        ]

    def enter(self) -> None:
        """Come to the job."""
        self.number = self._store.add("numbers", 1) - 1
        self._store.set(f"node/{self.number}", self._own.to_text())
        self._store.set(f"state/{self.number}", self._state.to_text())
        self._store.add(f"beat/{self.number}", 1)
        self._store.append("joined", f"{self.number},")  # pyright: ignore[reportAttributeAccessIssue]  (as clone)
        self.token = self._store.compare_set("token", "", secrets.token_hex(16)).decode()
        for thread in self._threads:
            thread.start()

    def say(self, state: State) -> None:
        """What this node does from now on."""
        with self._lock:
            self._state = state
        self._woken.set()

    @property
    def state(self) -> State:
        return self._state

    def leave(self, why: str = "") -> None:
        """Take part no more; returns when it is written."""
        self._over.set()
        self._woken.set()
        if self._threads[0].is_alive() and threading.current_thread() is not self._threads[0]:
            self._threads[0].join(5.0)
        self._store.set(f"state/{self.number}", State(Kind.LEFT, self._state.round, why).to_text())

    # The thread.

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._woken.wait(TICK_SECONDS)
                self._woken.clear()
                self._tell()
                self._look()
                self._answered_at = time.monotonic()
                self._hear()
                if not self._over.is_set():
                    self._lead()
        except dist.DistError as error:
            self._listener.over(1, f"the rendezvous is gone ({one_line(str(error))})")

    def _await_answers(self) -> None:
        """The second thread: a store that can't be reached does not answer, and gives no error for long."""
        while not self._over.wait(TICK_SECONDS):
            silent = time.monotonic() - self._answered_at
            if silent > max(2 * self._limits.lost_after, self._limits.lost_after + 2):
                self._over.set()
                self._listener.over(1, f"the rendezvous has not answered for {silent:.0f} s: is the network cut?")

    def _tell(self) -> None:
        with self._lock:
            state = self._state
        if state != self._told:
            self._told = state
            self._store.set(f"state/{self.number}", state.to_text())
            if state.trouble and state.round >= 0:
                self._announce(state.round, f"{self._own.name}: {state.trouble}")
        self._store.add(f"beat/{self.number}", 1)

    def _announce(self, number: int, why: str) -> None:
        if not self._store.check([f"trouble/{number}"]):
            self._store.set(f"trouble/{number}", why)

    def _look(self) -> None:
        """Read what is new."""
        now = time.monotonic()
        numbers = [int(text) for text in self._store.get("joined").decode().split(",") if text]
        for number in numbers:
            if number not in self._nodes:
                self._nodes[number] = Node.from_text(self._store.get(f"node/{number}").decode())
                self._newcomer_at = now
        beats = self._store.multi_get([f"beat/{number}" for number in numbers])
        for number, beat in zip(numbers, beats, strict=True):
            if number not in self._beats or self._beats[number][0] != beat:
                self._beats[number] = (beat, now)
        states = self._store.multi_get([f"state/{number}" for number in numbers])
        self._states = {n: State.from_text(text.decode()) for n, text in zip(numbers, states, strict=True)}
        after = 0 if self._newest is None else self._newest.number + 1
        while self._store.check([f"round/{after}"]):
            self._newest = Round.from_text(self._store.get(f"round/{after}").decode())
            self._trouble_since = None
            after += 1

    def _seen(self) -> dict[int, Seen]:
        """All nodes. When ranks have lost a peer, half the silence is enough to know which one it was."""
        now, silence = time.monotonic(), self._limits.lost_after / (1 if self._trouble_since is None else 2)
        return {
            number: Seen(state, now - self._beats[number][1] < silence, node.ranks, node.name)
            for number, state in self._states.items()
            for node in [self._nodes[number]]
        }

    def _hear(self) -> None:
        """Pass on what was decided."""
        if self._store.check(["end"]):
            self._over.set()
            status, why = json.loads(self._store.get("end"))
            self._listener.over(status, why)
            return
        newest, state = self._newest, self._state
        if newest is None:
            self._give_up_waiting(state)
            return
        for kind, told in (("trouble", self._listener.trouble), ("regroup", self._listener.regroup)):
            own = state.kind in (Kind.RUNNING, Kind.LEAVING) and state.round >= 0
            if own and (kind, state.round) not in self._heard and self._store.check([f"{kind}/{state.round}"]):
                self._heard.add((kind, state.round))
                told(state.round, self._store.get(f"{kind}/{state.round}").decode())
        if self.number in newest.nodes and state.kind is Kind.WAITING and newest.number > state.round:
            self._begin(newest, state)
        elif state.kind in (Kind.RUNNING, Kind.LEAVING) and newest.number > state.round:
            if ("trouble", state.round) not in self._heard:
                self._heard.add(("trouble", state.round))
                self._listener.trouble(state.round, "the others went on without this node, which had fallen silent")
        else:
            self._give_up_waiting(state)

    def _begin(self, newest: Round, state: State) -> None:
        """Begin a round, as soon as it is known where its ranks meet."""
        self._waits_since = time.monotonic()
        key, nodes = f"port/{newest.number}", dict(self._nodes)
        if newest.nodes[0] == self.number:
            self._store.set(key, str(self._listener.serve_round(newest, nodes)))
        elif not self._store.check([key]):
            time.sleep(_POLL_SECONDS)
            self._woken.set()
            return
        with self._lock:
            if self._state == state:
                self._state = State(Kind.RUNNING, newest.number)
        alive = {number for number, seen in self._seen().items() if seen.alive}
        self._listener.round_begins(newest, nodes, alive, int(self._store.get(key)))

    def _give_up_waiting(self, state: State) -> None:
        """A job that can't go on, or begin, ends; a spare waits for as long as the others train."""
        if self._is_too_many():
            self._over.set()
            limits = self._limits
            self._listener.over(2, f"the job has its {limits.most} nodes and {limits.spares} spares already")
            return
        training = self._newest is not None and any(
            seen.alive and seen.state.kind in (Kind.RUNNING, Kind.LEAVING) for seen in self._seen().values()
        )
        if state.kind is not Kind.WAITING or training:
            self._waits_since = time.monotonic()
        elif time.monotonic() - self._waits_since > self._limits.timeout:
            here = sum(seen.alive and seen.state.kind is Kind.WAITING for seen in self._seen().values())
            why = f"{here} nodes have waited for {self._limits.timeout:.0f} s for others"
            self._end(
                1, f"{why}: at least {self._limits.least}, in a number of ranks that the batch allows, are needed"
            )

    def _is_too_many(self) -> bool:
        """Whether as many as there may be were here before; known when the dead among them have been silent."""
        if self._newest is not None and self.number in self._newest.nodes:
            return False
        if time.monotonic() - self._entered_at < self._limits.lost_after + 1.0:
            return False
        before = sum(
            seen.alive and seen.state.kind is not Kind.LEFT
            for number, seen in self._seen().items()
            if number < self.number
        )
        return before >= self._limits.most + self._limits.spares

    def _end(self, status: int, why: str) -> None:
        self._store.set("end", json.dumps([status, why]))

    def _lead(self) -> None:
        """Decide, if this node is the first that lives."""
        seen = self._seen()
        alive = [number for number, one in seen.items() if one.alive and one.state.kind is not Kind.LEFT]
        if not alive or min(alive) != self.number:
            return
        now, current = time.monotonic(), self._newest
        decision = decide(
            current,
            seen,
            self._limits,
            quiet_for=now - self._newcomer_at,
            troubled_for=0.0 if self._trouble_since is None else now - self._trouble_since,
        )
        if decision.act is Act.TROUBLE and self._trouble_since is None:
            self._trouble_since = now
        self._carry_out(decision, current)

    def _carry_out(self, decision: Decision, current: Round | None) -> None:
        number = -1 if current is None else current.number
        if decision.act is Act.TROUBLE:
            self._announce(number, decision.why)
        elif decision.act is Act.REGROUP and not self._store.check([f"regroup/{number}"]):
            self._store.set(f"regroup/{number}", decision.why)
        elif decision.act is Act.FORM:
            begun = Round(number + 1, decision.nodes, decision.lost, decision.why)
            self._store.compare_set(f"round/{begun.number}", "", begun.to_text())
            self._woken.set()
        elif decision.act is Act.FINISH:
            self._end(0, "")


def address_towards(host: str, port: int) -> str:
    """This host's address on the way to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
