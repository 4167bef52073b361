"""One batch size for many numbers of ranks: the `elasticity` section, as DeepSpeed's elasticity documents it.

    base = each micro-batch, and the least common multiple of all
    candidate = base x the largest highly composite number that keeps it within max_train_batch_size
    allowed = numbers of ranks n within the bounds with candidate = micro-batch x accumulation x n for some micro-batch

The candidate with the most allowed numbers of ranks wins. Highly composite numbers have more divisors than any smaller
one, so few ranks more or less nearly always fit. A run that goes on with another number of ranks has the same batch,
by another accumulation; any other number is refused, where DeepSpeed's version 0.2 would change the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LARGEST_FACTOR = 1 << 20


@dataclass(frozen=True)
class ElasticRange:
    """What the section asks for; numbers of ranks are multiples of `ranks_per_node`.

    Attributes:
        batch: largest batch over all ranks, in samples.
        micro: micro-batches that fit on a rank, in samples.
        low, high: bounds for the number of ranks.
        prefer_larger: the larger batch where two allow as many numbers of ranks, and the larger micro-batch.
    """

    batch: int
    micro: tuple[int, ...]
    low: int
    high: int
    ranks_per_node: int = 1
    prefer_larger: bool = True


@dataclass(frozen=True)
class ElasticBatch:
    """The batch, and the numbers of ranks that may train with it, smallest first."""

    train: int
    sizes: tuple[int, ...]
    wanted: ElasticRange

    def micro_batch(self, ranks: int) -> int:
        """The micro-batch for so many ranks, one of `sizes`: the largest that fits, or the smallest."""
        fitting = [micro for micro in self.wanted.micro if self.train // ranks % micro == 0]
        return max(fitting) if self.wanted.prefer_larger else min(fitting)


def elastic_batch(wanted: ElasticRange) -> ElasticBatch | None:
    """The batch that allows the most numbers of ranks; None where no micro-batch fits at all."""
    nodes = wanted.ranks_per_node
    most = wanted.batch // nodes
    low, high = -(-wanted.low // nodes), wanted.high // nodes
    best: tuple[int, int] | None = None
    chosen: ElasticBatch | None = None
    for candidate in _candidates(most, wanted.micro):
        sizes = _allowed(candidate, wanted.micro, low, high)
        rank = (len(sizes), candidate if wanted.prefer_larger else -candidate)
        if sizes and (best is None or rank > best):
            best = rank
            chosen = ElasticBatch(candidate * nodes, tuple(size * nodes for size in sizes), wanted)
    return chosen


def _candidates(most: int, micro: Sequence[int]) -> set[int]:
    found: set[int] = set()
    for base in {*micro, math.lcm(*micro)}:
        if base <= most:
            found.add(base * max(factor for factor in _highly_composite(most // base)))
    return found


def _allowed(batch: int, micro: Iterable[int], low: int, high: int) -> list[int]:
    """Divisors of batch / micro-batch within the bounds, for any of the micro-batches."""
    found: set[int] = set()
    for size in micro:
        if batch % size == 0:
            steps = batch // size
            for divisor in range(1, math.isqrt(steps) + 1):
                if steps % divisor == 0:
                    found |= {divisor, steps // divisor}
    return sorted(size for size in found if low <= size <= high)


def _highly_composite(most: int) -> list[int]:
    """All up to `most`, and to a million: products of falling powers of the first primes, by their divisors."""
    limit = min(most, _LARGEST_FACTOR)
    found: list[tuple[int, int]] = []

    def grow(value: int, divisors: int, primes: Sequence[int], power: int) -> None:
        found.append((value, divisors))
        if primes:
            for count in range(1, power + 1):
                value *= primes[0]
                if value > limit:
                    return
                grow(value, divisors * (count + 1), primes[1:], count)

    grow(1, 1, (2, 3, 5, 7, 11, 13, 17, 19), limit.bit_length())
    record, highest = 0, []
    for value, divisors in sorted(found):
        if divisors > record:
            record = divisors
            highest.append(value)
    return highest
