"""Collectives of an update that run beside its computation: on a stream of their own where there is a device.

    compute   | writes a buffer |  other matrices ...        | arrive | reads the buffer
    beside                      | collective on that buffer  |

The buffers belong to the caller, who keeps them until what was sent has arrived. On a CPU the process group's threads
do the same. Rejected: the engine's streams, which an update does not see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zeroshard.comm.collectives import Collectives, Pending


@dataclass(frozen=True)
class Sent:
    """A collective that was issued.

    Attributes:
        arrived: on a device, the point in the stream beside compute at which it has arrived.
    """

    pending: Pending
    arrived: torch.cuda.Event | None


class BesideCompute:
    """Issues collectives of one communicator beside compute, in the order of the calls."""

    def __init__(self, peers: Collectives, device: torch.device) -> None:
        self._peers, self._device = peers, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, issue: Callable[[], Pending]) -> Sent:
        """Issue a collective after what compute was given so far."""
        if self._stream is None:
            return Sent(issue(), None)
        # Read after write: compute has written what is sent. Write after read: compute has read what is received into.
        # Both buffers are the caller's.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            pending, arrived = issue(), torch.cuda.Event()
            arrived.record()
        return Sent(pending, arrived)

    def arrive(self, sent: Sent) -> None:
        """Make what was received usable: compute, or on a CPU the host, waits for it."""
        if sent.arrived is not None:
            # Read after write: compute reads what this stream has received, in a buffer of the caller.
            torch.cuda.current_stream(self._device).wait_event(sent.arrived)
        self._peers.wait(sent.pending)
