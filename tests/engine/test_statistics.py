"""What ranks exchange in a step tells whether they issued the same operations, however many ranks there are."""

from __future__ import annotations

import random
from typing import cast

import pytest
import torch

import zeroshard
from tests.support.zoo import Stack
from zeroshard.comm.collectives import Collectives
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.core.statistics import digest_terms, exchange

LOGS = (2**63 - 1, *(random.Random(0).getrandbits(63) for _ in range(20)))


class _Ring:
    """Sums one rank after the other, as a ring does: this rank `size` times, the last one with a log of its own."""

    def __init__(self, size: int, last: int) -> None:
        self.size, self._last = size, last

    def all_reduce(self, values: torch.Tensor, unit: str) -> None:
        other = values.clone()
        other[1:3] = torch.tensor(digest_terms(self._last))
        own = values.clone()
        for _ in range(self.size - 2):
            values += own
        values += other

    def wait(self, pending: None) -> None:
        """Done."""


@pytest.mark.parametrize("size", [2, 33, 48, 64, 1000, 2**13])
def test_equal_logs_agree_and_one_that_differs_does_not(size: int) -> None:
    model, _ = zeroshard.shard(Stack(), plan=0)
    runtime = handle_of(model).runtime
    for digest in LOGS:
        for last in (digest, digest ^ 1):
            ring = cast(Collectives, _Ring(size, last))
            found = exchange(runtime, ring, {}, digest=digest)
            assert found.agree == (last == digest)
    zeroshard.close(model)
