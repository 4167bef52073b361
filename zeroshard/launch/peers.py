"""Lets the nodes of a job watch each other through the store of torch's rendezvous: if one ends, all end.

    node 0   heartbeat, heartbeat, trouble?    report: failed, 2nd, "rank 0 lost a peer"    all read the same reports,
    node 1   heartbeat, heartbeat, trouble!    report: killed, 1st, "rank 3 was killed"     and print the same first one
    node 2   heartbeat, (silent)               none: lost

torchrun's agents do not inform each other of failures: the other nodes wait in their collectives until these time out.
Here each node reads the store once a second. A consequence of a failure may be noticed before the failure itself, so
the first failure is determined when all nodes have written a report about their ranks, or have been silent for long. A
lost node and a killed rank have precedence over errors, which may follow from them. Rejected: connections between the
nodes and a decision at node 0, which need a second port and another protocol.
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

_HEARTBEAT_SECONDS = 1.0
_TROUBLE = "zeroshard/trouble"
# A node without a heartbeat for so many seconds is lost.
_SILENT_SECONDS = 30.0
_SILENT_IN_TROUBLE_SECONDS = 10.0
# Seconds to wait for reports; ranks have 10 seconds to end, then their node reports.
_REPORT_SECONDS = 40.0


class EndKind(str, Enum):
    """How a node's part of the job ended; a stopped or killed one is reported before a failed one."""

    STOPPED = "stopped"
    KILLED = "killed"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(frozen=True)
class Ending:
    """The end of a node's part of the job.

    Attributes:
        status: the exit status.
        text: what failed here: a headline, and lines of a traceback; "" if nothing failed.
        others: lines about the ranks that failed after the first.
    """

    how: EndKind
    status: int
    text: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Report:
    node: int
    how: EndKind
    text: str
    order: int

    @property
    def blame(self) -> tuple[bool, int]:
        """Sort key: the report with the smallest is that of the first failure."""
        return self.how is EndKind.FAILED, self.order


class Peers:
    """This node, whose ranks `watch` watches, among the nodes of its job; node 0 serves the store.

    Raises:
        UsageError: the store at node 0 can't be reached in time.
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
        self._heartbeats: dict[int, tuple[int, float]] = {}
        self._store.set(_key("host", job.node_rank), self._host)
        for work in (self._send_heartbeats, self._await_answers):
            threading.Thread(target=work, name="peers", daemon=True).start()

    def conclude(self, ending: Ending) -> int:
        """Report how this node's part ended, print the job's first failure, and leave; returns the exit status."""
        self._ending = ending
        first = None if self._watch.stopped_by else self._report_of_loss(0)
        with suppress(dist.DistError):
            if not self._unreachable:
                first = self._agree(ending)
        self._over.set()
        return self._print_first(first, ending)

    def _agree(self, ending: Ending) -> _Report | None:
        """Write this node's report, read the others' if there is trouble, and leave; returns the first failure."""
        if ending.how is not EndKind.ENDED:
            self._announce()
        report = json.dumps([ending.how.value, ending.text, self._order])
        self._store.set(_key("report", self._job.node_rank), report)
        first = self._first_failure() if self._store.check([_TROUBLE]) and ending.how is not EndKind.STOPPED else None
        self._leave()
        return first

    def _announce(self) -> None:
        if not self._order:
            self._order = self._store.add("zeroshard/order", 1)
            self._store.set(_TROUBLE, "")

    def _send_heartbeats(self) -> None:
        """The first thread: write heartbeats, announce this node's failures, and check for trouble of other nodes."""
        try:
            while not self._over.is_set():
                if self._watch.failed.wait(_HEARTBEAT_SECONDS):
                    self._watch.failed.clear()
                    self._announce()
                self._store.add(_key("heartbeat", self._job.node_rank), 1)
                self._answered_at = time.monotonic()
                if self._job.node_rank == 0 and any(map(self._is_lost, self._others())):
                    self._store.set(_TROUBLE, "")
                if self._store.check([_TROUBLE]):
                    self._end_ranks()
        except dist.DistError:
            self._end_without_store()

    def _await_answers(self) -> None:
        """The second thread: notices that the store does not answer, for which torch raises no error for long."""
        while not self._over.wait(_HEARTBEAT_SECONDS):
            if time.monotonic() - self._answered_at > _SILENT_SECONDS:
                self._end_without_store()
                return

    def _end_without_store(self) -> None:
        if self._unreachable:
            return
        self._unreachable = True
        if self._ending is not None and not self._over.is_set():  # the main thread may wait for the store
            os._exit(self._print_first(self._report_of_loss(0), self._ending))
        self._end_ranks()

    def _end_ranks(self) -> None:
        """End this node's ranks, unless they are ending already."""
        watch = self._watch
        if self._over.is_set() or self._order or self._ending or watch.ended_by_peer or watch.stopped_by:
            return
        watch.ended_by_peer = True
        # When its ranks have ended, the agent waits in C code, which runs no handlers; before they start there is none.
        if watch.all_ended_well or not watch.handles_stops:
            os._exit(self.conclude(Ending(EndKind.ENDED, 1)))
        os.kill(os.getpid(), signal.SIGTERM)

    def _others(self) -> set[int]:
        return set(range(self._job.nnodes)) - {self._job.node_rank}

    def _is_lost(self, node: int) -> bool:
        return self._is_silent(node, _SILENT_SECONDS) and not self._store.check([_key("left", node)])

    def _is_silent(self, node: int, seconds: float) -> bool:
        """Whether the node's count of heartbeats has not changed for so many seconds."""
        now, count = time.monotonic(), self._store.add(_key("heartbeat", node), 0)
        if node not in self._heartbeats or self._heartbeats[node][0] != count:
            self._heartbeats[node] = (count, now)
        return now - self._heartbeats[node][1] > seconds

    def _first_failure(self) -> _Report | None:
        """The report of the first failure, when all nodes have reported or are lost; None if a signal ends the wait."""
        reports: list[_Report] = []
        missing = set(range(self._job.nnodes))
        deadline = time.monotonic() + _REPORT_SECONDS
        while missing and self._watch.stopped_by is None:
            for node in sorted(missing):
                if self._store.check([_key("report", node)]):
                    how, text, order = json.loads(self._store.get(_key("report", node)))
                    reports.append(_Report(node, EndKind(how), text, order))
                elif self._is_silent(node, _SILENT_IN_TROUBLE_SECONDS) or time.monotonic() > deadline:
                    reports.append(self._report_of_loss(node))
                else:
                    continue
                missing.discard(node)
            if missing:
                time.sleep(0.1)
        blamed = [report for report in reports if report.how is not EndKind.ENDED]
        return min(blamed, key=lambda report: report.blame) if blamed and not missing else None

    def _report_of_loss(self, node: int) -> _Report:
        host, key = self._job.master_addr, _key("host", node)
        if node != 0:
            host = self._store.get(key).decode() if self._store.check([key]) else "unknown"
        return _Report(node, EndKind.STOPPED, f"zeroshard: node {node} (host {host}) was lost first: it fell silent", 0)

    def _leave(self) -> None:
        """Leave the job; node 0, whose process serves the store, waits for the others to leave before it."""
        staying = self._others() if self._job.node_rank == 0 else set()
        if not staying:
            self._over.set()  # the store may end at any time from here on
        self._store.set(_key("left", self._job.node_rank), "")
        while staying and self._watch.stopped_by is None:
            for node in tuple(staying):
                if self._store.check([_key("left", node)]) or self._is_silent(node, _SILENT_IN_TROUBLE_SECONDS):
                    staying.discard(node)
            time.sleep(0.05)

    def _print_first(self, first: _Report | None, ending: Ending) -> int:
        """Print the first failure; with a launcher only the node of that failure prints it, else each node does."""
        lines: list[str] = []
        if first is not None and first.node == self._job.node_rank:
            lines.append(ending.text)
            if self._job.over_ssh:
                send(kind="first")
        else:
            if first is not None and (not self._job.over_ssh or first.how is EndKind.STOPPED):
                lines.append(first.text)
            if ending.text and ending.how is not EndKind.STOPPED:
                headline = ending.text.partition("\n")[0].removeprefix("zeroshard: ")
                lines.append(f"zeroshard: then {headline.replace(' failed first: ', ' failed: ', 1)}")
        lines += ending.others
        if self._watch.ended_by_peer and self._watch.handles_stops:
            lines.append("zeroshard: ended the ranks of this node")
        if lines:
            say("\n".join(lines))
        return ending.status or int(first is not None)


def _key(what: str, node: int) -> str:
    return f"zeroshard/{what}/{node}"
