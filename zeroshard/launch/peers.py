"""The nodes of a job watch each other, through the store of torch's rendezvous: what ends one of them ends all.

    node 0   beat, beat, trouble?    report: failed, 2nd, "rank 0 lost a peer"    all read the same reports,
    node 1   beat, beat, trouble!    report: killed, 1st, "rank 3 was killed"     and tell the same first one
    node 2   beat, (silent)          none: lost

torchrun's agents do not tell each other of failures: the other nodes wait in their collectives until these time out.
Here each node asks the store once a second. News of what follows from a failure may overtake the news of it, so nobody
is blamed before all nodes have looked at their ranks and written a report, or have been silent for long: a node that
is lost and a rank that was killed go before errors, which they cause. Connections between the nodes and a judge at
node 0 were rejected: a second port, and a protocol of its own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

import torch.distributed as dist

from zeroshard.cluster import DEFAULT_PORT
from zeroshard.errors import UsageError
from zeroshard.launch.failures import RankWatch
from zeroshard.launch.job import Job
from zeroshard.launch.messages import say, send
from zeroshard.launch.report import one_line

_BEAT_SECONDS = 1.0
_TROUBLE = "zeroshard/trouble"
# A node of which nothing was heard for so long is lost.
_SILENT_SECONDS = 30.0
_SILENT_IN_TROUBLE_SECONDS = 10.0
# Ranks have 10 seconds to end; then their node reports.
_REPORT_SECONDS = 40.0


class How(str, Enum):
    """How the part of a node ended; the first two are blamed before the third."""

    STOPPED = "stopped"
    KILLED = "killed"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(frozen=True)
class Ending:
    """The end of a node's part of the job.

    Attributes:
        status: the exit status.
        text: why, if something failed here: a headline, perhaps lines of traceback.
        others: lines on the ranks that failed after the first.
    """

    how: How
    status: int
    text: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Report:
    node: int
    how: How
    text: str
    order: int

    @property
    def blame(self) -> tuple[bool, int]:
        """The smallest is to blame."""
        return self.how is How.FAILED, self.order


class Peers:
    """This node, whose ranks `watch` watches, among those of its job; node 0 brings the store.

    Raises UsageError if there is no store at node 0 in time.
    """

    def __init__(self, job: Job, watch: RankWatch) -> None:
        assert job.master_addr is not None
        self._job, self._watch = job, watch
        self._host = job.node_name or socket.gethostname()
        port = job.master_port or DEFAULT_PORT
        try:
            self._store = dist.TCPStore(
                job.master_addr,
                port,
                is_master=job.node_rank == 0,
                timeout=timedelta(seconds=job.rendezvous_timeout),
                wait_for_workers=False,
                multi_tenant=True,  # the agent's rendezvous uses the same
            )
        except dist.DistError as error:
            raise UsageError(f"the nodes did not meet at {job.master_addr}:{port}: {one_line(str(error))}") from error
        self._order = 0
        self._ending: Ending | None = None
        self._unreachable = False
        self._over = threading.Event()
        self._answered_at = time.monotonic()
        self._beats: dict[int, tuple[int, float]] = {}
        self._store.set(_key("host", job.node_rank), self._host)
        for work in (self._beat, self._await_answers):
            threading.Thread(target=work, name="peers", daemon=True).start()

    def conclude(self, ending: Ending) -> int:
        """Report how this node's part ended, tell what came first in the job, and leave; the exit status."""
        self._ending = ending
        first = None if self._watch.stopped_by else self._loss_of(0)
        with suppress(dist.DistError):
            if not self._unreachable:
                first = self._agree(ending)
        self._over.set()
        return self._tell(first, ending)

    def _agree(self, ending: Ending) -> _Report | None:
        """Write this node's report, read those of the others if there is trouble, and leave."""
        if ending.how is not How.ENDED:
            self._announce()
        report = json.dumps([ending.how.value, ending.text, self._order])
        self._store.set(_key("report", self._job.node_rank), report)
        first = self._first() if self._store.check([_TROUBLE]) and ending.how is not How.STOPPED else None
        self._leave()
        return first

    def _announce(self) -> None:
        if not self._order:
            self._order = self._store.add("zeroshard/order", 1)
            self._store.set(_TROUBLE, "")

    def _beat(self) -> None:
        """The first thread: show that this node lives, tell of its failures, and see whether another is in trouble."""
        try:
            while not self._over.is_set():
                if self._watch.failed.wait(_BEAT_SECONDS):
                    self._watch.failed.clear()
                    self._announce()
                self._store.add(_key("beat", self._job.node_rank), 1)
                self._answered_at = time.monotonic()
                if self._job.node_rank == 0 and any(map(self._is_lost, self._others())):
                    self._store.set(_TROUBLE, "")
                if self._store.check([_TROUBLE]):
                    self._end_ranks()
        except dist.DistError:
            self._end_without_store()

    def _await_answers(self) -> None:
        """The second thread: a store that can't be reached does not answer, and gives no error for long."""
        while not self._over.wait(_BEAT_SECONDS):
            if time.monotonic() - self._answered_at > _SILENT_SECONDS:
                self._end_without_store()
                return

    def _end_without_store(self) -> None:
        if self._unreachable:
            return
        self._unreachable = True
        if self._ending is not None and not self._over.is_set():  # the main thread may wait for it
            os._exit(self._tell(self._loss_of(0), self._ending))
        self._end_ranks()

    def _end_ranks(self) -> None:
        """End this node's part, unless it is ending."""
        watch = self._watch
        if self._over.is_set() or self._order or self._ending or watch.ended_by_peer or watch.stopped_by:
            return
        watch.ended_by_peer = True
        # After the ranks the agent waits for other nodes in C code, where no handler runs; before them there is none.
        if watch.all_ended_well or not watch.hears_stops:
            os._exit(self.conclude(Ending(How.ENDED, 1)))
        os.kill(os.getpid(), signal.SIGTERM)

    def _others(self) -> set[int]:
        return set(range(self._job.nnodes)) - {self._job.node_rank}

    def _is_lost(self, node: int) -> bool:
        return self._is_silent(node, _SILENT_SECONDS) and not self._store.check([_key("left", node)])

    def _is_silent(self, node: int, seconds: float) -> bool:
        """Whether the node's beats have not been counted on for so long."""
        now, count = time.monotonic(), self._store.add(_key("beat", node), 0)
        if node not in self._beats or self._beats[node][0] != count:
            self._beats[node] = (count, now)
        return now - self._beats[node][1] > seconds

    def _first(self) -> _Report | None:
        """The report to blame, when all nodes have written one or are lost; None if a signal ends the waiting."""
        reports: list[_Report] = []
        missing = set(range(self._job.nnodes))
        deadline = time.monotonic() + _REPORT_SECONDS
        while missing and self._watch.stopped_by is None:
            for node in sorted(missing):
                if self._store.check([_key("report", node)]):
                    how, text, order = json.loads(self._store.get(_key("report", node)))
                    reports.append(_Report(node, How(how), text, order))
                elif self._is_silent(node, _SILENT_IN_TROUBLE_SECONDS) or time.monotonic() > deadline:
                    reports.append(self._loss_of(node))
                else:
                    continue
                missing.discard(node)
            if missing:
                time.sleep(0.1)
        blamed = [report for report in reports if report.how is not How.ENDED]
        return min(blamed, key=lambda report: report.blame) if blamed and not missing else None

    def _loss_of(self, node: int) -> _Report:
        host, key = self._job.master_addr, _key("host", node)
        if node != 0:
            host = self._store.get(key).decode() if self._store.check([key]) else "unknown"
        return _Report(node, How.STOPPED, f"zeroshard: node {node} (host {host}) was lost first: it fell silent", 0)

    def _leave(self) -> None:
        """Node 0, whose process holds the store, leaves last."""
        staying = self._others() if self._job.node_rank == 0 else set()
        if not staying:
            self._over.set()  # the store may go at any moment now
        self._store.set(_key("left", self._job.node_rank), "")
        while staying and self._watch.stopped_by is None:
            for node in tuple(staying):
                if self._store.check([_key("left", node)]) or self._is_silent(node, _SILENT_IN_TROUBLE_SECONDS):
                    staying.discard(node)
            time.sleep(0.05)

    def _tell(self, first: _Report | None, ending: Ending) -> int:
        """What was first, once: a launcher above hears it from the node to blame, else each node has an output."""
        lines: list[str] = []
        if first is not None and first.node == self._job.node_rank:
            lines.append(ending.text)
            if self._job.over_ssh:
                send(kind="first")
        else:
            if first is not None and (not self._job.over_ssh or first.how is How.STOPPED):
                lines.append(first.text)
            if ending.text and ending.how is not How.STOPPED:
                headline = ending.text.partition("\n")[0].removeprefix("zeroshard: ")
                lines.append(f"zeroshard: then {headline.replace(' failed first: ', ' failed: ', 1)}")
        lines += ending.others
        if self._watch.ended_by_peer and self._watch.hears_stops:
            lines.append("zeroshard: ended the ranks of this node")
        if lines:
            say("\n".join(lines))
        return ending.status or int(first is not None)


def _key(what: str, node: int) -> str:
    return f"zeroshard/{what}/{node}"
