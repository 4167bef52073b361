"""Computes the bytes that one-bit averaging sends, from the layouts alone.

    chunk of a rank:  [ one bit per element of its shard | float32 scale per piece of a parameter, padded to the most ]

Each rank sends to every other rank the chunk of the other's shard (all-to-all), then its averaged chunk to all
(all-gather).
"""

from __future__ import annotations

from zeroshard.plan.plan import Plan
from zeroshard.sharding.layout import FlatLayout

SCALE_NBYTES = 4


def most_pieces(layout: FlatLayout) -> int:
    """The largest number of parameter pieces in a shard; the chunks of all ranks have room for so many scales."""
    return max(len(layout.pieces(*layout.shard_range(rank))) for rank in range(layout.shards))


def chunk_nbytes(layout: FlatLayout) -> int:
    """Bytes of the compressed form of one shard."""
    return layout.shard_numel // 8 + SCALE_NBYTES * most_pieces(layout)


def compressed_nbytes(plan: Plan) -> int:
    """Payload of either collective of a compressed step: the chunks of all shards of all trainable groups."""
    layouts = [group.layout for _, group in plan.groups() if group.compressed and group.trainable]
    return sum(layout.shards * chunk_nbytes(layout) for layout in layouts)
