"""`zeroshard rendezvous`: the store in which the nodes of an elastic job meet, on a host that outlives them.

Without it the node whose address was given serves the store, and the job ends with that node. All that is in it is
small. It serves one job: the nodes of a second one would meet what is left of the first.
"""

from __future__ import annotations

import signal

import torch.distributed as dist

from zeroshard.errors import UsageError
from zeroshard.launch.elastic.membership import status_of_job
from zeroshard.launch.messages import say
from zeroshard.launch.report import one_line

_LOOK_SECONDS = 1.0
_STAY_SECONDS = 5.0
"""How long nodes may take to hear that their job is over."""


def serve(port: int, *, once: bool) -> int:
    """Serve until a signal ends it, or with `once` until the job has ended; the exit status."""
    try:
        store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except dist.DistError as error:
        raise UsageError(f"--port {port}: this host can't listen on it ({one_line(str(error))})") from error
    say(f"zeroshard: nodes may meet at port {store.port}")
    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    while signal.sigtimedwait(ends, _LOOK_SECONDS) is None:
        status = status_of_job(store) if once else None
        if status is not None:
            signal.sigtimedwait(ends, _STAY_SECONDS)
            return status
    return 0
