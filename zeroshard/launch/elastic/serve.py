"""`zeroshard rendezvous`: the store in which the nodes of elastic jobs meet, on a host that outlives them.

Without it the node whose address was given serves the store, and the job ends with that node. All that is in it is
small; one store may serve several jobs one after the other only, since their nodes would meet each other.
"""

from __future__ import annotations

import signal

import torch.distributed as dist

from zeroshard.errors import UsageError
from zeroshard.launch.messages import say
from zeroshard.launch.report import one_line


def serve(port: int) -> None:
    """Serve until a signal ends it."""
    try:
        store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except dist.DistError as error:
        raise UsageError(f"--port {port}: this host can't listen on it ({one_line(str(error))})") from error
    say(f"zeroshard: nodes may meet at port {store.port}")
    ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    signal.sigwait(ends)
