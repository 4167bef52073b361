"""Reads small tensors back from the device two passes late, so that the host never waits for the device.

    pass n      a kernel computes the values; a copy into pinned memory is queued behind it
    pass n+1    not read yet: the device may still be busy with pass n
    pass n+2    read: the device has finished pass n, or is about to

When a value is read depends only on the number of the pass, so all ranks that start the same reads finish them in the
same pass. On a CPU callers use the values at once. Rejected: reading whatever has arrived, since an error would then be
raised in a different pass on each rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

import torch

Subject = TypeVar("Subject")
DELAY = 2
"""How many passes later a value is read."""


class _Started(NamedTuple, Generic[Subject]):
    subject: Subject
    started_in: int
    values: torch.Tensor
    arrived: torch.cuda.Event


class DelayedReads(Generic[Subject]):
    """Copies from the device to the host that are read later; each has a subject, which tells the caller what it is."""

    def __init__(self) -> None:
        self._pass = 0
        self._started: deque[_Started[Subject]] = deque()

    def next_pass(self) -> None:
        """A pass begins: the reads that started two passes ago are ready."""
        self._pass += 1

    def start(self, subject: Subject, values: torch.Tensor) -> None:
        """Start to copy `values`, which the current stream computes, to the host."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._started.append(_Started(subject, self._pass, host, arrived))

    def ready(self, *, all_of_them: bool = False) -> Iterator[tuple[Subject, torch.Tensor]]:
        """Take the reads that are two passes old, in the order of their start; or all, waiting for the device."""
        while self._started and (all_of_them or self._started[0].started_in + DELAY <= self._pass):
            subject, _, values, arrived = self._started.popleft()
            arrived.synchronize()
            yield subject, values


def on_host(values: torch.Tensor) -> torch.Tensor:
    """The values on the host at once: the host waits for the device, since they decide what it does next."""
    if not values.is_cuda:
        return values
    read: DelayedReads[None] = DelayedReads()
    read.start(None, values)
    return next(read.ready(all_of_them=True))[1]
