"""Computes the bytes over each link in one optimizer step, for one GPU."""

from __future__ import annotations

from collections.abc import Mapping

from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.offload import link_traffic as plan_link_traffic
from zeroshard.plan.traffic import disk_traffic
from zeroshard.planner.predict.rows import Row


def link_traffic(row: Row) -> Mapping[str, int]:
    """Bytes of a step by link: received over the GPU's link and the network, and both ways over PCIe and to disk.

    A ring over several nodes enters each node once, so per GPU the network carries 1/per_node of the received bytes.
    """
    disk = disk_traffic(row.plan, micro_batches=row.micro_batches).total
    wire = sum(row.traffic().values())
    network = wire // row.cluster.per_node if row.cluster.nodes > 1 else 0
    return {row.cluster.gpu.link: wire, "network": network, "PCIe": _pcie(row), "disk": disk}


def _pcie(row: Row) -> int:
    """Bytes between device and host of an update, and of gathers of parameters that rest off the device."""
    moved = plan_link_traffic(row.plan)
    passes = -(-row.micro_batches // row.plan.policy.micro_batches)
    gathered = sum(
        2 * passes * group.layout.shard_numel * itemsize(group.param.dtype)
        for _, group in row.plan.groups()
        if group.param.off_device
    )
    return moved.down + moved.up + gathered
