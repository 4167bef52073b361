"""Answers that the device computes and the host reads later, without waiting for the device in between.

    pass n      a kernel computes the answer; it is copied into pinned memory behind it
    pass n+1    not read: the device may be busy with pass n
    pass n+2    read; the device has passed it, or is about to

What is read when depends on the number of the pass alone, so ranks that ask the same read it in the same pass. On a CPU
answers are read at once. Rejected: reading what has arrived by now; an error would come in another pass on each rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

import torch

Subject = TypeVar("Subject")
LATE = 2
"""How many passes later an answer is read."""


class _Late(NamedTuple, Generic[Subject]):
    subject: Subject
    asked_in: int
    answer: torch.Tensor
    arrived: torch.cuda.Event


class LateAnswers(Generic[Subject]):
    """Answers by subject, in the order in which they were asked."""

    def __init__(self) -> None:
        self._now = 0
        self._late: deque[_Late[Subject]] = deque()

    def next_pass(self) -> None:
        """A pass begins: answers of the one before the last are ready."""
        self._now += 1

    def ask(self, subject: Subject, answer: torch.Tensor) -> None:
        """Have `answer` copied to the host; it is computed on the current stream."""
        host = torch.empty(answer.shape, dtype=answer.dtype, pin_memory=True)
        host.copy_(answer, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._late.append(_Late(subject, self._now, host, arrived))

    def ready(self, *, all_of_them: bool = False) -> Iterator[tuple[Subject, torch.Tensor]]:
        """Take the answers that can be read without waiting for the last pass, or all."""
        while self._late and (all_of_them or self._late[0].asked_in + LATE <= self._now):
            subject, _, answer, arrived = self._late.popleft()
            arrived.synchronize()
            yield subject, answer


def on_host(answer: torch.Tensor) -> torch.Tensor:
    """An answer that decides what the host does next: the host waits for it."""
    if not answer.is_cuda:
        return answer
    now: LateAnswers[None] = LateAnswers()
    now.ask(None, answer)
    return next(now.ready(all_of_them=True))[1]
