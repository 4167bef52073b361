"""Computes how long a collective takes, from latency and bandwidth, on one node or over several.

    one node      t = latency + hops x latency of a hop + wire / link
    flat ring     t = latency + hops + wire / min(link, node's network), since a ring enters and leaves each node once
    two levels    1/per_node of the tensor between nodes through each GPU's own network card, then within the node

`wire` is what each rank receives: (n-1)/n of an all-gather's output or a reduce-scatter's input, twice that for an
all-reduce. (Thakur, Rabenseifner and Gropp 2005, section 3; hierarchy as in ZeRO++, arXiv:2306.10209, section 4.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeroshard.planner.machine.hardware import Cluster

FACTORS = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0, "all-reduce": 2.0}


@dataclass(frozen=True)
class Ranks:
    """A group of `size` ranks, `per_node` of them on each node that it touches."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


def group_of(cluster: Cluster, size: int, *, stride: int = 1) -> Ranks:
    """A group of `size` neighbouring ranks, or of every `stride`-th rank."""
    per_node = max(1, min(size, cluster.per_node // stride))
    return Ranks(size, per_node)


def collective_seconds(cluster: Cluster, kind: str, nbytes: int, ranks: Ranks, *, two_levels: bool = False) -> float:
    """Seconds of one collective with a payload of `nbytes` (an all-gather's output, a reduce-scatter's input).

    Args:
        kind: one of FACTORS.
        two_levels: collectives over several nodes run between the nodes first, then within each.
    """
    if ranks.size < 2 or not nbytes:
        return 0.0
    factor = FACTORS[kind]
    share = cluster.efficiency
    link, nic = cluster.gpu.link_rate * share.link, cluster.nic * share.nic
    if ranks.nodes == 1:
        return _level(nbytes, ranks.size, link, share.collective_latency, share.hop_latency, factor)
    if two_levels and ranks.per_node > 1:
        between = _level(
            nbytes // ranks.per_node, ranks.nodes, nic, share.collective_latency, share.network_hop_latency, factor
        )
        return between + _level(nbytes, ranks.per_node, link, share.collective_latency, share.hop_latency, factor)
    rate = min(link, nic * ranks.per_node)
    hops = (ranks.nodes - 1) * share.network_hop_latency + (ranks.size - ranks.nodes) * share.hop_latency
    wire = nbytes * (ranks.size - 1) / ranks.size
    return share.collective_latency + factor * (hops + wire / rate)


def _level(nbytes: int, size: int, rate: float, latency: float, hop: float, factor: float) -> float:
    """Seconds of a collective on one level: log2(size) hops, as each round doubles the distance, and a ring's bytes."""
    wire = nbytes * (size - 1) / size
    return latency + factor * (math.ceil(math.log2(size)) * hop + wire / rate)
