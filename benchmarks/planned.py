"""What the planner says of the plan that a measured engine runs: to stand beside what was measured.

    allocated_gib    peak of the device, as torch's allocator counts it, and `parts_gib` what it is made of
    total_gib        what that takes of the card: with the allocator's slack, context and communicators
    host_gib         state in host memory of one rank; a process has its libraries beside
    disk_gib         state on disk of one rank
    step_s           the simulated step
    floor_s          its kernels of forward and backward alone, one after the other
    bound_s          the busiest of compute, the link to the host, the host's own update and the disk, `bound` says
                     which: what a step can't fall below, however well all of it overlaps

Rejected: predicting from the benchmark's arguments. The engine may decide more (who updates, which share, peers), and
the plan it runs says what it decided.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.planner_cases import workload
from benchmarks.setting import Setting
from zeroshard.engine.memory.host_memory import available_bytes
from zeroshard.errors import PlanError
from zeroshard.plan.builder import reordered
from zeroshard.plan.placement import StateKind, Tier
from zeroshard.plan.plan import Plan
from zeroshard.plan.traffic import disk_traffic
from zeroshard.planner.machine.calibration import calibrated, load_calibration
from zeroshard.planner.machine.hardware import GIB, Cluster, find_gpu, parse_cluster
from zeroshard.planner.predict.cost import kernels_seconds
from zeroshard.planner.predict.memory import step_memory
from zeroshard.planner.predict.rows import device_nbytes
from zeroshard.planner.predict.timeline import step_time
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.compiled import compiled
from zeroshard.planner.trace.model_trace import Trace, total_kernels

ASSUMED = "H100-80GB"


def planned(
    setting: Setting, plan: Plan, world: int, calibration: Path | None = None, disk_rate: float | None = None
) -> dict[str, Any]:
    """The planner's figures of a step under `plan` on this machine, for JSON.

    Args:
        disk_rate: bytes per second that the disk reads and writes, both counted; None for what is assumed.
    """
    work = workload(setting.size, setting.batch, setting.length, setting.checkpointing)
    traced = work.trace(plan, Checkpointing.OFF)  # the model checkpoints by itself
    traced = compiled(traced, keeps_inputs_only=setting.checkpointing) if setting.compiled else traced
    plan = reordered(plan, (0, *traced.order))
    cluster = machine(world, calibration)
    if disk_rate is not None:
        cluster = replace(cluster, efficiency=replace(cluster.efficiency, disk_rate=disk_rate))
    tokens = setting.batch * setting.accumulation * setting.length
    return figures(plan, traced, cluster, setting.accumulation, tokens)


def figures(plan: Plan, traced: Trace, cluster: Cluster, micro_batches: int, tokens: float) -> dict[str, Any]:
    """The planner's figures of a step of `plan` with a trace of its model.

    Args:
        micro_batches: of a step.
        tokens: of a step and rank.
    """
    memory = step_memory(plan, traced)
    time = step_time(plan, traced, cluster, micro_batches=micro_batches)
    bounds = {"compute": sum(time.compute.values()), "link": time.busy["copies"], "host": time.busy["cpu"]}
    bounds["disk"] = disk_traffic(plan, micro_batches=micro_batches).total / cluster.efficiency.disk_rate
    bound = max(bounds, key=lambda name: bounds[name])
    return {
        "stage": _stage(plan),
        "update": "+".join(sorted(update.value for update in plan.updates)) or None,
        "share_on_host": round(_share(plan, Tier.HOST), 3),
        "share_on_disk": round(_share(plan, Tier.NVME), 3),
        "step_s": round(time.seconds, 4),
        "tokens_s": round(tokens / time.seconds),
        "allocated_gib": round(memory.peak.total / GIB, 3),
        "total_gib": round(device_nbytes(memory) / GIB, 3),
        "host_gib": round(sum(memory.tiers.host.values()) / GIB, 3),
        "disk_gib": round(sum(memory.tiers.nvme.values()) / GIB, 3),
        "moment": memory.peak.label,
        "parts_gib": {name: round(nbytes / GIB, 3) for name, nbytes in memory.peak.nbytes.items()},
        "bound_s": round(bounds[bound], 4),
        "bound": bound,
        "bounds": {name: round(seconds, 4) for name, seconds in bounds.items()},
        "floor_s": round(_floor_seconds(traced, cluster) * micro_batches, 4),
        "card": cluster.gpu.name,
    }


def _floor_seconds(traced: Trace, cluster: Cluster) -> float:
    """Forward and backward of a micro-batch alone."""
    kernels = total_kernels(traced.segments)
    return max(kernels_seconds(cluster, kernels), kernels.total() * cluster.efficiency.host_launch)


def _stage(plan: Plan) -> int:
    """ZeRO's number of what most units do."""
    groups = [group for _, group in plan.groups() if group.trainable]
    held = [
        [group.placement(kind) for group in groups] for kind in (StateKind.MOMENTS, StateKind.GRAD, StateKind.PARAM)
    ]
    divided = [sum(p is not None and p.divided for p in found) * 2 >= len(groups) for found in held]
    return sum(divided)


def _share(plan: Plan, tier: Tier) -> float:
    """Elements whose moments rest on a tier, of all that are trained."""
    sizes = [(group.layout.numel, group.placement(StateKind.MOMENTS)) for _, group in plan.groups() if group.trainable]
    away = sum(numel for numel, placement in sizes if placement is not None and placement.tier is tier)
    return away / max(1, sum(numel for numel, _ in sizes))


def machine(world: int, calibration: Path | None = None) -> Cluster:
    """This machine as the planner knows it: its card, or an H100 where there is none that it knows."""
    gpu = ASSUMED
    if torch.cuda.is_available():
        try:
            gpu = find_gpu(torch.cuda.get_device_name(0)).name
        except PlanError as error:
            print(f"{error}; taken for {ASSUMED}", file=sys.stderr)
    cluster = parse_cluster(f"{world}x{gpu}", per_node=world)
    cluster = replace(cluster, host_memory=available_bytes() or cluster.host_memory)
    if torch.cuda.is_available():
        cluster = replace(cluster, gpu=replace(cluster.gpu, memory=torch.cuda.mem_get_info(0)[1]))
    return cluster if calibration is None else calibrated(cluster, load_calibration(calibration))
