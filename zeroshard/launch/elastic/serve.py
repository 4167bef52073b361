"""`zeroshard rendezvous`: serves the store of an elastic job, on a host that outlives the job's nodes.

Without it the node whose address was given serves the store, and the job ends with that node. The store is small. It
serves one job only: the nodes of a second job would read the keys of the first.
"""

from __future__ import annotations

import json
import signal
import time

import torch.distributed as dist

from zeroshard.errors import UsageError
from zeroshard.launch.elastic.membership import PREFIX
from zeroshard.launch.elastic.rounds import Kind, State
from zeroshard.launch.messages import say
from zeroshard.launch.report import one_line
from zeroshard.launch.runner import PREEMPTED

_POLL_SECONDS = 1.0
_LOST_SECONDS = 10.0
"""A node is lost that has been silent for so long."""
_END_SECONDS = 5.0
"""The store is served for so many seconds after the end of the job, so that all nodes can read it."""


def serve(port: int, *, once: bool) -> int:
    """Serve until a signal comes, or with `once` until the job has ended; returns the exit status.

    SIGTERM lets the nodes end first: schedulers send it to all processes of a job, whose ranks may be about to save. A
    second one, or another signal, ends it at once.

    Returns:
        0; with `once` the job's status, 1 if it has not ended.

    Raises:
        UsageError: this host can't listen on the port.
    """
    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the store starts threads, which would get the signals
    try:
        store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except dist.DistError as error:
        raise UsageError(f"--port {port}: this host can't listen on it ({one_line(str(error))})") from error
    say(f"zeroshard: nodes may meet at port {store.port}")
    job, told = JobView(store), False
    while True:
        got = signal.sigtimedwait(ends, _POLL_SECONDS)
        if got is not None:
            if told or got.si_signo != signal.SIGTERM or not job.has_nodes():
                break
            told = True
            say("zeroshard: SIGTERM received: the rendezvous ends when all nodes have; a second one ends it at once")
        has_nodes, status = job.has_nodes(), job.status()
        if told and not has_nodes:
            break
        if once and status is not None:
            if has_nodes:
                signal.sigtimedwait(ends, _END_SECONDS)
            break
    status = job.status()
    return 0 if not once else 1 if status is None else status


class JobView:
    """The job of a store as the process sees it that serves the store; ask every second or so."""

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore(PREFIX, store)
        self._heartbeats: dict[str, tuple[bytes, float]] = {}

    def has_nodes(self) -> bool:
        """Whether nodes are in the job: they have not left it, and have written heartbeats lately."""
        if not self._store.check(["joined"]):
            return False
        now, found = time.monotonic(), False
        for number in self._store.get("joined").decode().rstrip(",").split(","):
            beat, state = self._store.multi_get([f"heartbeat/{number}", f"state/{number}"])
            if number not in self._heartbeats or self._heartbeats[number][0] != beat:
                self._heartbeats[number] = (beat, now)
            alive = now - self._heartbeats[number][1] < _LOST_SECONDS
            found |= alive and State.from_text(state.decode()).kind is not Kind.LEFT
        return found

    def status(self) -> int | None:
        """The status with which the job has ended; None while it runs."""
        if self._store.check(["end"]):
            return json.loads(self._store.get("end"))[0]
        return PREEMPTED if self._store.check(["saved"]) and not self.has_nodes() else None
