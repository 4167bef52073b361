"""Computes seconds of kernels and of the engine's own passes on a card, by the share of its peaks that they reach."""

from __future__ import annotations

from collections.abc import Mapping

from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.groups import GroupPlan, UnitPlan
from zeroshard.plan.placement import StateKind
from zeroshard.planner.machine.hardware import Cluster
from zeroshard.planner.trace.kernels import Kernel, KernelKind


def kernel_seconds(cluster: Cluster, kernel: Kernel) -> float:
    """Seconds of one launch: the longer of its arithmetic and its memory traffic."""
    gpu, share = cluster.gpu, cluster.efficiency
    moving = kernel.nbytes / (gpu.hbm * share.elementwise)
    if kernel.kind is KernelKind.ELEMENTWISE:
        return share.kernel_latency + moving
    reached = share.products if kernel.kind is KernelKind.GEMM else share.attention
    return share.kernel_latency + max(kernel.flops / (gpu.peak(kernel.dtype) * reached), kernel.nbytes / gpu.hbm)


def kernels_seconds(cluster: Cluster, kernels: Mapping[Kernel, int]) -> float:
    """Seconds of many launches, one after the other."""
    return sum(kernel_seconds(cluster, kernel) * count for kernel, count in kernels.items())


def copy_seconds(cluster: Cluster, nbytes: float) -> float:
    """Seconds of a pass over device memory that reads and writes `nbytes` altogether."""
    return nbytes / (cluster.gpu.hbm * cluster.efficiency.elementwise)


def update_nbytes(group: GroupPlan) -> int:
    """Bytes that an update of this rank's part of a group reads and writes.

    Gradients are read; master weights and moments are read and written; parameters are written, and read where they are
    their own master or the upper half of a split one. With whole fp32 masters and bf16 gradients: 28 bytes a parameter.
    """
    if not group.trainable or group.grad is None:
        return 0
    numel = group.layout.shard_numel if group.update_axes else group.layout.numel
    param, grad = itemsize(group.param.dtype), itemsize(group.grad.dtype)
    placements = (group.placement(kind) for kind in (StateKind.MASTER, StateKind.MOMENTS))
    kept = sum(placement.nbytes(numel) for placement in placements if placement is not None)
    whole_master = group.master is not None and group.master.dtype == "float32"
    return numel * (grad + (param if whole_master else 2 * param)) + 2 * kept


def update_seconds(cluster: Cluster, unit: UnitPlan) -> float:
    """Seconds of the update of one unit on the device."""
    return sum(map(update_nbytes, unit.groups)) / (cluster.gpu.hbm * cluster.efficiency.update)


def norm_seconds(cluster: Cluster, units: tuple[UnitPlan, ...]) -> float:
    """Seconds of the pass that sums the squares of this rank's part of the gradients."""
    nbytes = sum(
        group.layout.shard_numel * itemsize(group.grad.dtype)
        for unit in units
        for group in unit.groups
        if group.grad is not None
    )
    return nbytes / (cluster.gpu.hbm * cluster.efficiency.norm)
