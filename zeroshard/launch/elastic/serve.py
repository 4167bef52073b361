"""`zeroshard rendezvous`: serves the store of an elastic job, on a host that outlives the job's nodes.

Without it the node whose address was given serves the store, and the job ends with that node. The store is small. It
serves one job only: the nodes of a second job would read the keys of the first.
"""

from __future__ import annotations

import signal

import torch.distributed as dist

from zeroshard.errors import UsageError
from zeroshard.launch.elastic.membership import JobView
from zeroshard.launch.messages import say
from zeroshard.launch.report import one_line

_POLL_SECONDS = 1.0
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
