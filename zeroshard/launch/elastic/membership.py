"""This node's membership in an elastic job: it writes heartbeats and its state into a store, and reads decisions there.

    joined          0,1,2,            numbers of nodes in the order in which they came
    node/1          name, ranks       properties that don't change
    state/1         running, 0, ...   what the node does (rounds.State)
    heartbeat/1     42                a count that grows; a node whose count stops is lost
    trouble/0       why               round 0 can't continue; its ranks go to their gates
    regroup/0       why               round 0 ends between two steps
    save/0          why               round 0 is the last one: all ranks save and end
    round/1         0,2               the nodes of round 1; the first node that writes this key has decided
    end             0, ""             the job has ended, with this status, and why
    limits          1, 4, 0, [...]    the numbers of nodes, spares and ranks with which the first node was started
    saved           1                 ranks were told to stop, have saved and ended; the job ends with its last node

Of the nodes that live the one with the lowest number decides, by `rounds.decide`, and writes the decision. If two nodes
both consider themselves the lowest, the first write of `round/1` counts. Rejected: an elected leader, whose loss has to
be noticed before anything can be decided; callbacks between nodes, which need a port on each.

The store is torch's TCPStore, served by the node whose address was given, or by `zeroshard rendezvous` on another host.
If the store is lost, the job ends.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from zeroshard.errors import UsageError
from zeroshard.launch.elastic.rounds import Act, Decision, Kind, Limits, NodeView, Round, State, choose, decide
from zeroshard.launch.report import one_line

TICK_SECONDS = 0.1
PREFIX = "zeroshard/elastic"
_POLL_SECONDS = 0.02
_GATHER_SECONDS = 1.0
"""A node that asks to leave waits so long for others that are told to end as well."""
_REMINDER_SECONDS = 20.0
"""A node that waits for others says so every so many seconds."""
_SIZES_SHOWN = 8


@dataclass(frozen=True)
class Node:
    """What a node writes about itself when it joins.

    Attributes:
        name: for messages.
        ranks: number of ranks.
        address, port: of its memory server.
    """

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
    """Is informed of decisions; called in the thread of the membership."""

    def serve_round(self, begun: Round, nodes: dict[int, Node]) -> int:
        """This node is the first of a round: serve the store of the round's ranks; returns the port."""
        ...

    def round_begins(self, begun: Round, nodes: dict[int, Node], alive: set[int], port: int) -> None:
        """A round begins, with this node in it.

        Args:
            nodes: all nodes that have ever joined, by number.
            alive: those with heartbeats.
            port: port of the round's store, at the address of the round's first node.
        """
        ...

    def trouble(self, number: int, why: str) -> None:
        """Round `number`, in which this node is, can't continue."""
        ...

    def regroup(self, number: int, why: str) -> None:
        """Round `number` is to end between two steps."""
        ...

    def save(self, number: int, why: str) -> None:
        """All ranks of round `number` are to save and to end."""
        ...

    def can_save(self) -> bool:
        """Whether this node's ranks can save when they are told to end."""
        ...

    def waits(self, why: str) -> None:
        """This node waits for others without which no round can begin; called now and then."""
        ...

    def over(self, status: int, why: str) -> None:
        """The job is over for this node."""
        ...


def connect(address: str, port: int, timeout: float) -> tuple[dist.TCPStore, bool]:
    """The store of a job, and whether this process serves it.

    It does if the address is this host's and no other process listens there.

    Raises:
        UsageError: the store can't be reached within `timeout` seconds.
    """
    limit = timedelta(seconds=timeout)
    if _is_own_address(address):
        with suppress(dist.DistError):  # the port is taken: by `zeroshard rendezvous`, or by another node of this host
            return dist.TCPStore(address, port, is_master=True, timeout=limit, wait_for_workers=False), True
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False), False
    except dist.DistError as error:
        why = one_line(str(error))
        if "Ping failed" in why:
            why = "what answers there is another service; give the port of zeroshard rendezvous"
        raise UsageError(f"the nodes did not meet at {address}:{port}: {why}") from error


def _is_own_address(address: str) -> bool:
    """Whether an address is one of this host's."""
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


class Membership:
    """This node in its job; `enter` begins it. Methods may be called from any thread.

    Attributes:
        number: this node's number, known after `enter`.
        token: the token of the job's memory servers, known after `enter`.
    """

    def __init__(self, store: dist.Store, own: Node, limits: Limits, listener: Listener) -> None:
        self._store = dist.PrefixStore(PREFIX, store)
        self._own, self._limits, self._listener = own, limits, listener
        self.number, self.token = -1, ""
        self._lock = threading.Lock()
        self._state = State(Kind.DOWN)
        self._written_state: State | None = None
        self._nodes: dict[int, Node] = {}
        self._heartbeats: dict[int, tuple[bytes, float]] = {}
        self._newest: Round | None = None
        self._notified: set[tuple[str, int]] = set()
        self._newcomer_at = self._waiting_since = self._entered_at = time.monotonic()
        self._reminded_at = self._waiting_since
        self._trouble_since: float | None = None
        self._leaving_since: float | None = None
        self._answered_at = time.monotonic()
        self._over, self._woken = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"membership-{name}", daemon=True)
            for name, work in (("rounds", self._run), ("answers", self._await_answers))
        ]

    def enter(self) -> None:
        """Join the job, and start the threads.

        Raises:
            UsageError: the job has ended, or this node was started with other numbers than the job's first one.
        """
        self._check_job()
        self.number = self._store.add("numbers", 1) - 1
        self._store.set(f"node/{self.number}", self._own.to_text())
        self._store.set(f"state/{self.number}", self._state.to_text())
        self._store.add(f"heartbeat/{self.number}", 1)
        self._store.append("joined", f"{self.number},")  # pyright: ignore[reportAttributeAccessIssue]  (as clone)
        self.token = self._store.compare_set("token", "", secrets.token_hex(16)).decode()
        for thread in self._threads:
            thread.start()

    def _check_job(self) -> None:
        """Raises UsageError if this node can't take part in the store's job."""
        if self._store.check(["end"]):
            raise UsageError(
                "the job that met at this rendezvous has ended, and a rendezvous serves one job: end it and start it "
                "again (zeroshard rendezvous), or give another --master-port, for a new job"
            )
        limits = self._limits
        sizes = None if limits.sizes is None else list(limits.sizes)
        own = [limits.least, limits.most, limits.spares, sizes]
        first = json.loads(self._store.compare_set("limits", "", json.dumps(own)))
        if first[:2] != own[:2]:
            what = f"--nodes {own[0]}:{own[1]}: the job's first node has --nodes {first[0]}:{first[1]}"
        elif first[2] != own[2]:
            what = f"--spares {own[2]}: the job's first node has --spares {first[2]}"
        elif first[3] != own[3]:
            here, there = _ranks(own[3]), _ranks(first[3])
            what = f"--elastic: this node's config allows {here}, that of the job's first node {there}"
        else:
            return
        raise UsageError(f"{what}; start all nodes of a job alike, and another job with another rendezvous")

    def set_state(self, state: State) -> None:
        """Set what this node does from now on; its thread writes it into the store."""
        with self._lock:
            self._state = state
        self._woken.set()

    @property
    def state(self) -> State:
        return self._state

    def others_can_go_on(self) -> bool:
        """Whether the other nodes can form a round without this one."""
        newest = self._newest
        views = self._node_views() if newest is not None else {}
        going = (Kind.WAITING, Kind.RUNNING, Kind.DOWN)  # the last are about to start their ranks again
        others = {n: seen for n, seen in views.items() if n != self.number and seen.alive and seen.state.kind in going}
        return newest is not None and bool(choose(others, newest.nodes, self._limits))

    @property
    def newest_round(self) -> int:
        """The number of the newest round that is known; -1 for none."""
        return -1 if self._newest is None else self._newest.number

    def note_saved(self) -> None:
        """Write down that this node's ranks, which were told to stop, have saved and ended."""
        self._store.set("saved", "1")

    def await_others(self, seconds: float) -> None:
        """Wait, at most so long, until all other nodes have left the job or are lost."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(
            view.alive and view.state.kind is not Kind.LEFT
            for number, view in self._node_views().items()
            if number != self.number
        ):
            time.sleep(_POLL_SECONDS)

    def leave(self, why: str = "") -> None:
        """Leave the job; returns when that is written into the store."""
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
                self._write_state()
                self._read_store()
                self._answered_at = time.monotonic()
                self._notify()
                if not self._over.is_set():
                    self._decide_if_first()
        except dist.DistError as error:
            self._listener.over(1, f"the rendezvous is gone ({one_line(str(error))})")

    def _await_answers(self) -> None:
        """The second thread: notices that the store does not answer, for which torch raises no error for long."""
        while not self._over.wait(TICK_SECONDS):
            silent = time.monotonic() - self._answered_at
            if silent > max(2 * self._limits.lost_after, self._limits.lost_after + 2):
                self._over.set()
                self._listener.over(1, f"the rendezvous has not answered for {silent:.0f} s: is the network cut?")

    def _write_state(self) -> None:
        with self._lock:
            state = self._state
        if state != self._written_state:
            self._written_state = state
            self._store.set(f"state/{self.number}", state.to_text())
            if state.trouble and state.round >= 0:
                self._announce(state.round, f"{self._own.name}: {state.trouble}")
        self._store.add(f"heartbeat/{self.number}", 1)

    def _announce(self, number: int, why: str) -> None:
        if not self._store.check([f"trouble/{number}"]):
            self._store.set(f"trouble/{number}", why)

    def _read_store(self) -> None:
        """Read new nodes, heartbeats, states and rounds."""
        now = time.monotonic()
        numbers = [int(text) for text in self._store.get("joined").decode().split(",") if text]
        for number in numbers:
            if number not in self._nodes:
                self._nodes[number] = Node.from_text(self._store.get(f"node/{number}").decode())
                self._newcomer_at = now
        beats = self._store.multi_get([f"heartbeat/{number}" for number in numbers])
        for number, beat in zip(numbers, beats, strict=True):
            if number not in self._heartbeats or self._heartbeats[number][0] != beat:
                self._heartbeats[number] = (beat, now)
        states = self._store.multi_get([f"state/{number}" for number in numbers])
        self._states = {n: State.from_text(text.decode()) for n, text in zip(numbers, states, strict=True)}
        after = 0 if self._newest is None else self._newest.number + 1
        while self._store.check([f"round/{after}"]):
            self._newest = Round.from_text(self._store.get(f"round/{after}").decode())
            self._trouble_since = None
            after += 1

    def _node_views(self) -> dict[int, NodeView]:
        """All nodes as this one sees them. During trouble a node is lost after half as many seconds of silence."""
        now, silence = time.monotonic(), self._limits.lost_after / (1 if self._trouble_since is None else 2)
        return {
            number: NodeView(state, now - self._heartbeats[number][1] < silence, node.ranks, node.name)
            for number, state in self._states.items()
            for node in [self._nodes[number]]
        }

    def _notify(self) -> None:
        """Inform the listener of new decisions."""
        if self._store.check(["end"]):
            self._over.set()
            status, why = json.loads(self._store.get("end"))
            self._listener.over(status, why)
            return
        newest, state = self._newest, self._state
        if newest is None:
            self._check_waiting(state)
            return
        told_of = (
            ("trouble", self._listener.trouble),
            ("regroup", self._listener.regroup),
            ("save", self._listener.save),
        )
        for kind, told in told_of:
            own = state.kind in (Kind.RUNNING, Kind.LEAVING) and state.round >= 0
            if own and (kind, state.round) not in self._notified and self._store.check([f"{kind}/{state.round}"]):
                self._notified.add((kind, state.round))
                told(state.round, self._store.get(f"{kind}/{state.round}").decode())
        if self.number in newest.nodes and state.kind is Kind.WAITING and newest.number > state.round:
            self._begin(newest, state)
        elif state.kind in (Kind.RUNNING, Kind.LEAVING) and newest.number > state.round:
            if ("trouble", state.round) not in self._notified:
                self._notified.add(("trouble", state.round))
                self._listener.trouble(state.round, "the others went on without this node, which had fallen silent")
        else:
            self._check_waiting(state)

    def _begin(self, newest: Round, state: State) -> None:
        """Begin a round, as soon as the port of its store is known."""
        self._waiting_since = time.monotonic()
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
        alive = {number for number, seen in self._node_views().items() if seen.alive}
        self._listener.round_begins(newest, nodes, alive, int(self._store.get(key)))

    def _check_waiting(self, state: State) -> None:
        """End the job if this node has waited too long; while other nodes train it may wait without limit."""
        if state.kind is Kind.LEFT:
            return
        if self._is_too_many():
            self._over.set()
            limits = self._limits
            self._listener.over(2, f"the job has its {limits.most} nodes and {limits.spares} spares already")
            return
        training = self._newest is not None and any(
            seen.alive and seen.state.kind in (Kind.RUNNING, Kind.LEAVING) for seen in self._node_views().values()
        )
        if state.kind is not Kind.WAITING or training:
            self._waiting_since = self._reminded_at = time.monotonic()
        elif time.monotonic() - self._waiting_since > self._limits.timeout:
            self._end(1, self._missing())
        elif time.monotonic() - self._reminded_at > _REMINDER_SECONDS:
            self._reminded_at = time.monotonic()
            self._listener.waits(
                f"{self._missing()}; an error after {self._limits.timeout:.0f} s (--rendezvous-timeout)"
            )

    def _missing(self) -> str:
        """For how long this node has waited, which nodes wait, and how many are needed."""
        limits = self._limits
        here = [seen for seen in self._node_views().values() if seen.alive and seen.state.kind is Kind.WAITING]
        nodes, ranks = len(here), sum(seen.ranks for seen in here)
        waiting = f"{nodes} node{'s' if nodes != 1 else ''} with {ranks} rank{'s' if ranks != 1 else ''}"
        needed = f"{limits.least} to {limits.most} nodes" if limits.most > limits.least else f"{limits.least} nodes"
        allowed = "" if limits.sizes is None else f", with {_ranks(limits.sizes)} in all (--elastic)"
        seconds = time.monotonic() - self._waiting_since
        return f"{waiting} waited for others for {seconds:.0f} s; the job needs {needed}{allowed}"

    def _is_too_many(self) -> bool:
        """Whether the job had all its nodes and spares before this one; known when dead nodes have been silent."""
        if self._newest is not None and self.number in self._newest.nodes:
            return False
        if time.monotonic() - self._entered_at < self._limits.lost_after + 1.0:
            return False
        before = sum(
            seen.alive and seen.state.kind is not Kind.LEFT
            for number, seen in self._node_views().items()
            if number < self.number
        )
        return before >= self._limits.most + self._limits.spares

    def _end(self, status: int, why: str) -> None:
        self._store.set("end", json.dumps([status, why]))

    def _decide_if_first(self) -> None:
        """Decide, if this node is the living one with the lowest number."""
        seen = self._node_views()
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
        if self._gathers(seen, current, now) and decision.act in (Act.REGROUP, Act.SAVE):
            return
        self._carry_out(decision, current)

    def _gathers(self, seen: Mapping[int, NodeView], current: Round | None, now: float) -> bool:
        """Whether a node has asked to leave so lately that others may be about to: all of a job may be told to end."""
        asked = current is not None and any(
            one.state.kind is Kind.LEAVING for number, one in seen.items() if number in current.nodes
        )
        self._leaving_since = None if not asked else self._leaving_since or now
        return self._leaving_since is not None and now - self._leaving_since < _GATHER_SECONDS

    def _carry_out(self, decision: Decision, current: Round | None) -> None:
        number = -1 if current is None else current.number
        if decision.act is Act.TROUBLE:
            self._announce(number, decision.why)
        elif decision.act in (Act.REGROUP, Act.SAVE):
            if not any(self._store.check([f"{name}/{number}"]) for name in ("regroup", "save")):
                saves = decision.act is Act.SAVE and self._listener.can_save()
                self._store.set(f"{'save' if saves else 'regroup'}/{number}", decision.why)
        elif decision.act is Act.FORM:
            begun = Round(number + 1, decision.nodes, decision.lost, decision.why)
            self._store.compare_set(f"round/{begun.number}", "", begun.to_text())
            self._woken.set()
        elif decision.act is Act.FINISH:
            self._end(0, decision.why)


def _ranks(sizes: Sequence[int] | None) -> str:
    """Allowed numbers of ranks, for messages."""
    if sizes is None:
        return "any number of ranks"
    shown = ", ".join(str(size) for size in sizes[:_SIZES_SHOWN])
    return f"{shown}{' or more' if len(sizes) > _SIZES_SHOWN else ''} ranks"


def address_towards(host: str, port: int) -> str:
    """This host's address on the interface that leads to another host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
