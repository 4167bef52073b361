"""`zeroshard rendezvous`: serves the store of an elastic job, on a host that outlives the job's nodes.

Without it the node whose address was given serves the store, and the job ends with that node. The store is small. It
serves one job only: the nodes of a second job would read the keys of the first.
"""

from __future__ import annotations

import signal

import torch.distributed as dist

from zeroshard.errors import UsageError
from zeroshard.launch.elastic.membership import status_of_job
from zeroshard.launch.messages import say
from zeroshard.launch.report import one_line

_POLL_SECONDS = 1.0
_END_SECONDS = 5.0
"""The store is served for so many seconds after the end of the job, so that all nodes can read it."""


def serve(port: int, *, once: bool) -> int:
    """Serve until a signal comes, or with `once` until the job has ended; returns the exit status.

    Raises:
        UsageError: this host can't listen on the port.
    """
    try:
        store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except dist.DistError as error:
        raise UsageError(f"--port {port}: this host can't listen on it ({one_line(str(error))})") from error
    say(f"zeroshard: nodes may meet at port {store.port}")
    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    while signal.sigtimedwait(ends, _POLL_SECONDS) is None:
        status = status_of_job(store) if once else None
        if status is not None:
            signal.sigtimedwait(ends, _END_SECONDS)
            return status
    return 0
