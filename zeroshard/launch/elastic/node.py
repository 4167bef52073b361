"""A node of an elastic job: starts its ranks, informs them of rounds, and starts them again when they have ended.

    membership (store) --round, trouble, regroup, over--> Node --gate--> ranks
    torch's agent      --ranks have ended---------------> Node --state--> membership

Ranks are processes of torch's elastic agent, as on any node. At the gate a rank gets its number in the job and the size
of the round. With `zeroshard.run_elastic` its process stays from round to round; otherwise it is ended and started
again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from zeroshard.launch.agent import Ranks, launch
from zeroshard.launch.elastic.gate import Gate, Message
from zeroshard.launch.elastic.membership import Membership, Node, address_towards, connect
from zeroshard.launch.elastic.memory_server import MemoryServer
from zeroshard.launch.elastic.rounds import Kind, Limits, Round, State
from zeroshard.launch.failures import RankWatch
from zeroshard.launch.job import Job, OnSigterm
from zeroshard.launch.messages import say
from zeroshard.launch.runner import PREEMPTED, SOCKET_VARIABLE

_LEAVE_SECONDS = 20.0
_POLL_SECONDS = 0.5
_HAS_LEFT = f"this node has left the job, as SIGTERM asked it to; status {PREEMPTED}"
_HANDOVER_SECONDS = 2.0
"""A node that has left stays until no other node has read its memory for so long in the next round."""


@dataclass
class _JobEnd:
    """How the job ended for this node."""

    status: int
    why: str


class ElasticNode:
    """This node while its job lasts: a `Listener` of its membership."""

    def __init__(self, job: Job, ranks: int, directory: Path, limits: Limits) -> None:
        self._job, self._ranks, self._directory, self._limits = job, ranks, directory, limits
        self._lock = threading.RLock()
        self._watch: RankWatch | None = None
        self._over: _JobEnd | None = None
        self._round: Round | None = None
        self._ranks_died, self._why = False, ""
        self._ended_by_us = False
        self._round_store: dist.TCPStore | None = None
        self._memory_server = MemoryServer()
        self._gate = Gate(directory, ranks, self._gate_changed, self._memory_server)
        os.environ[SOCKET_VARIABLE] = str(self._gate.path)
        self._membership: Membership | None = None
        self._asked_to_leave, self._has_left, self._serves = threading.Event(), False, False
        if job.on_sigterm is OnSigterm.LEAVE:
            threading.Thread(target=self._leave_when_asked, name="leave", daemon=True).start()

    def run(self, prepare: Callable[[], str]) -> int:
        """Take part until the job is over; returns the exit status.

        Args:
            prepare: sets threads and cores for the ranks, and returns a description for the user.

        Raises:
            UsageError: the job's store can't be reached, or this node can't take part in its job.
        """
        job = self._job
        assert job.master_addr is not None
        assert job.master_port is not None
        store, self._serves = connect(job.master_addr, job.master_port, self._limits.timeout)
        own = address_towards(job.master_addr, job.master_port)
        name = job.node_name or os.uname().nodename
        node = Node(f"host {name} ({own})", self._ranks, own, self._memory_server.port)
        self._membership = Membership(store, node, self._limits, self)
        self._membership.enter()
        self._memory_server.token = self._membership.token
        ranks = f"{self._ranks} rank{'s' if self._ranks > 1 else ''}"
        say(f"zeroshard: node {self._membership.number} of an elastic job, {ranks}, {prepare()}")
        try:
            return self._run_ranks(self._membership)
        finally:
            with self._lock:
                over = self._over
            if over is None or over.status == 0 or "rendezvous" not in over.why:
                with suppress(dist.DistError):  # the rendezvous has ended, and this node's status is known
                    self._membership.leave()
            self._gate.close()
            self._memory_server.close()

    def _run_ranks(self, membership: Membership) -> int:
        """Start the ranks, and again after failures, unless they fail too often without a step between."""
        without_step, start, most_steps = 0, 0, 0
        while True:
            self._ended_by_us = False
            inner = replace(self._job, nnodes=1, node_rank=0, master_addr=None, master_port=None)
            outcome = launch(Ranks(inner, self._ranks, self._directory, start), self._watch_ranks)
            start += 1
            with self._lock:
                over, round_, by_us = self._over, self._round, self._ended_by_us
            if over is not None:
                if over.why:
                    say(f"zeroshard: {over.why}")
                return over.status or (0 if outcome.status == 0 or by_us else outcome.status)
            number = -1 if round_ is None else round_.number
            if self._asked_to_leave.is_set() and (outcome.failed or by_us) and membership.others_can_go_on():
                self._has_left = True
                membership.set_state(State(Kind.LEFT, number, "a rank has failed" if outcome.failed else "", True))
                self._await_handover(number)
                say(f"zeroshard: {_HAS_LEFT}")
                return PREEMPTED
            if outcome.status == 0:
                return self._finish(membership, number)
            if not (outcome.failed or by_us):
                if outcome.status == PREEMPTED:
                    membership.note_saved()
                    if self._serves:  # the store ends with this process
                        membership.await_others(_LEAVE_SECONDS)
                return outcome.status  # stopped by a signal from outside
            # Not a round: a failure that comes again in the same step forms a new round each time.
            before, most_steps = most_steps, self._gate.most_steps()
            without_step = 1 if most_steps > before else without_step + 1
            if without_step > self._job.max_restarts:
                say(f"zeroshard: the ranks of this node have ended {without_step} times without a step: giving up")
                membership.leave("its ranks failed again and again")
                return outcome.status or 1
            self._ranks_died, self._why = True, "a rank has failed" if outcome.failed else "its ranks start again"
            membership.set_state(State(Kind.DOWN, number, self._why, True))
            say(f"zeroshard: starting the ranks of this node again (start {start + 1})")

    def _finish(self, membership: Membership, number: int) -> int:
        """All ranks of this node have ended well: wait for other nodes, which may need this node's memory server."""
        membership.set_state(State(Kind.DONE, number))
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._over is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return 0

    def _watch_ranks(self, watch: RankWatch | None) -> None:
        """The agent is about to start the ranks, or they have ended."""
        if watch is not None and self._job.on_sigterm is OnSigterm.LEAVE:
            watch.leave = self._ask_to_leave
        with self._lock:
            self._watch = watch
        if watch is not None:
            threading.Thread(target=self._end_with_first, args=(watch,), name="first-failure", daemon=True).start()

    def _end_with_first(self, watch: RankWatch) -> None:
        """When a rank has failed, end the others at once: the job waits until this node's ranks have started again.

        A rank that stays stopped (SIGSTOP) is killed: other nodes can't distinguish it from a slow one.
        """
        stopped: dict[int, float] = {}
        while not watch.failed.wait(_POLL_SECONDS):
            with self._lock:
                if self._watch is not watch:
                    return
            now, found = time.monotonic(), _stopped(watch)
            stopped = {pid: stopped.get(pid, now) for pid in found}
            for pid in [pid for pid, since in stopped.items() if now - since > self._limits.lost_after]:
                say(f"zeroshard: process {pid}, a rank, has been stopped for {now - stopped[pid]:.0f} s; ending it")
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with self._lock:
            if self._watch is watch and self._membership is not None:
                number = -1 if self._round is None else self._round.number
                self._membership.set_state(State(Kind.DOWN, number, "a rank has failed", True))
                watch.kill_ranks()

    # What the ranks do.

    def _gate_changed(self) -> None:
        membership = self._membership
        with self._lock:
            if self._over is not None:  # ranks that were starting while the job ended
                self._gate.open({local: {"end": 0} for local in range(self._ranks)})
                return
            if membership is None or not self._gate.all_are_waiting():
                return
            waiting = self._gate.waiting().values()
            if any(one.restart for one in waiting):
                self._end_ranks()
                return
            number = max(one.left for one in waiting)
            trouble = next((one.trouble for one in waiting if one.trouble), self._why)
            number = max(number, -1 if self._round is None else self._round.number)
            if self._asked_to_leave.is_set() and (number < 0 or membership.others_can_go_on()):
                if not self._has_left:
                    self._has_left = True
                    membership.set_state(State(Kind.LEFT, number, trouble, self._ranks_died))
                    threading.Thread(target=self._end_left, args=(number,), name="handover", daemon=True).start()
                return
            if membership.state.kind is not Kind.WAITING:
                membership.set_state(State(Kind.WAITING, number, trouble, self._ranks_died))

    # What SIGTERM asks for.

    def _ask_to_leave(self) -> bool:
        """In the handler of the signal: whether this node leaves by it."""
        if self._serves:  # the job would end with this node
            return False
        first = not self._asked_to_leave.is_set()
        self._asked_to_leave.set()
        return first

    def _leave_when_asked(self) -> None:
        """In a thread: leave when the ranks can, which the other nodes decide while a round runs."""
        self._asked_to_leave.wait()
        say("zeroshard: SIGTERM received: this node leaves the job between two steps; a second one ends it at once")
        with self._lock:
            if self._membership is not None and self._membership.state.kind is Kind.RUNNING:
                self._membership.set_state(State(Kind.LEAVING, self._membership.state.round))
        self._gate_changed()  # the ranks may wait there already

    def _end_left(self, number: int) -> None:
        """In a thread: end the ranks, which wait at the gate, when the others have the state."""
        self._await_handover(number)
        with self._lock:
            if self._over is None:
                self._over = _JobEnd(PREEMPTED, _HAS_LEFT)
                self._gate.open({local: {"end": 0} for local in range(self._ranks)})

    def _await_handover(self, number: int) -> None:
        """Wait until the next round has begun and reads this node's memory no more."""
        assert self._membership is not None
        end, begun_at = time.monotonic() + _LEAVE_SECONDS, 0.0
        while number >= 0 and self._over is None and (now := time.monotonic()) < end:
            if not begun_at and self._membership.newest_round > number:
                begun_at = now
            if begun_at and now - max(begun_at, self._memory_server.asked_at) > _HANDOVER_SECONDS:
                return
            time.sleep(0.05)

    # What is decided.

    def serve_round(self, begun: Round, nodes: dict[int, Node]) -> int:
        """See Listener."""
        address = nodes[begun.nodes[0]].address
        self._round_store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return self._round_store.port

    def round_begins(self, begun: Round, nodes: dict[int, Node], alive: set[int], port: int) -> None:
        """See Listener."""
        assert self._membership is not None
        place = begun.nodes.index(self._membership.number)
        others = [number for number in alive if number not in begun.nodes]
        counts = [nodes[number].ranks for number in begun.nodes]
        base, world = sum(counts[:place]), sum(counts)
        with self._lock:
            self._round, self._ranks_died, self._why = begun, False, ""
            common = {
                "round": begun.number,
                "world_size": world,
                "group_rank": place,
                "group_world_size": len(counts),
                "store": [nodes[begun.nodes[0]].address, port],
                "job_store": [self._job.master_addr, self._job.master_port],
                "lost": bool(begun.lost),
                "why": begun.why,
                "counts": counts,
                "memory_servers": [[nodes[n].address, nodes[n].port] for n in (*begun.nodes, *others)],
                "token": self._memory_server.token,
            }
            self._gate.open({local: {**common, "rank": base + local} for local in range(self._ranks)})
            if self._asked_to_leave.is_set():  # the others could not begin a round without this node
                self._membership.set_state(State(Kind.LEAVING, begun.number))
        if place == 0:
            names = ", ".join(nodes[number].name for number in begun.nodes)
            because = f" ({begun.why})" if begun.why else ""
            say(f"zeroshard: round {begun.number}{because}: {world} ranks on {names}")

    def trouble(self, number: int, why: str) -> None:
        """See Listener."""
        self._end_round({"event": "trouble", "round": number, "why": why})

    def regroup(self, number: int, why: str) -> None:
        """See Listener."""
        self._end_round({"event": "regroup", "round": number, "why": why})

    def save(self, number: int, why: str) -> None:
        """See Listener."""
        with self._lock:
            if self._watch is not None and self._over is None and not self._watch.ask_to_save():
                say(f"zeroshard: {why}, without which the job can't go on, but the ranks of this node can't save")

    def can_save(self) -> bool:
        """See Listener."""
        with self._lock:
            return self._watch is not None and self._watch.can_save()

    def _end_round(self, event: Message) -> None:
        """End the round: ranks that listen go to the gate by themselves; if there are others, all ranks are ended."""
        with self._lock:
            if self._watch is None or self._over is not None:
                return
            self._gate.tell(event)
            listening = self._gate.listening()
            at_gate = self._gate.waiting()
            informed = (
                listening if event["event"] == "regroup" else {local for local, stays in listening.items() if stays}
            )
            if any(local not in informed and local not in at_gate for local in range(self._ranks)):
                self._end_ranks()
                return
        threading.Thread(target=self._end_late_ranks, args=(event["round"],), name="late-ranks", daemon=True).start()

    def _end_late_ranks(self, number: int) -> None:
        """End the ranks if not all have come to the gate in time: they hang, or were stopped."""
        deadline = time.monotonic() + self._limits.patience
        while time.monotonic() < deadline:
            time.sleep(0.1)
            with self._lock:
                if self._over is not None or self._gate.all_are_waiting():
                    return
                if self._round is None or self._round.number != number or self._watch is None:
                    return
                if _stopped(self._watch):
                    break
        with self._lock:
            if self._round is not None and self._round.number == number and not self._gate.all_are_waiting():
                say("zeroshard: ranks of this node did not leave the round in time; ending them")
                self._end_ranks()

    def waits(self, why: str) -> None:
        """See Listener."""
        say(f"zeroshard: {why}")

    def over(self, status: int, why: str) -> None:
        """See Listener."""
        with self._lock:
            if self._over is not None:
                return
            self._over = _JobEnd(status, why)
            end = {"end": status}
            self._gate.open(dict.fromkeys(range(self._ranks), end))
            finished = status == 0
        if finished:
            return  # ranks at the gate have been told, others are about to end by themselves
        with self._lock:
            self._end_ranks()

    def _end_ranks(self) -> None:
        """Kill the ranks: they may hang, and state that is kept is in memory that outlives them."""
        watch = self._watch
        if watch is None or watch.ended_by_peer or watch.stopped_by:
            return
        self._ended_by_us = True
        watch.ended_by_peer = True
        watch.kill_ranks()
        os.kill(os.getpid(), signal.SIGTERM)


def _stopped(watch: RankWatch) -> list[int]:
    """The process ids of ranks that are stopped (SIGSTOP, a debugger)."""
    found: list[int] = []
    for process in watch.processes():
        with suppress(OSError, IndexError):
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in "Tt":
                found.append(process.pid)
    return found
