"""Computes one row of the planner's table: a setting, its plan, and its memory, traffic, time and cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from zeroshard.mesh import Mesh
from zeroshard.plan.builder import Recipe, with_peer_copies
from zeroshard.plan.check import peer_problem
from zeroshard.plan.dtypes import torch_dtype
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import Plan
from zeroshard.plan.traffic import step_traffic
from zeroshard.planner.machine.hardware import GIB, Cluster
from zeroshard.planner.predict.memory import StepMemory, step_memory
from zeroshard.planner.predict.tiers import TABLE, Offload, allowed, gpu_recipe
from zeroshard.planner.predict.timeline import StepTime, step_time
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.compiled import compiled
from zeroshard.planner.trace.model_trace import Trace, total_kernels
from zeroshard.planner.trace.workload import Workload

BILLION = 10**9
SAFE_SHARE = 0.95
"""Share of the memory above which a row is chosen only if nothing smaller fits, since fragmentation may end the run."""
ALLOCATOR_SHARE, ALLOCATOR_FIXED = 0.045, 0.6 * GIB
"""What the allocator reserves above what is allocated, as a share and a constant; six measurements fit in 0.2 GiB."""
CONTEXT = 1.0 * GIB
"""CUDA context, libraries and communicators, which the allocator does not count. An assumption, not a measurement."""


@dataclass(frozen=True)
class Setting:
    """The choices of a row. `ratio` is the share of the optimizer's state that is offloaded."""

    stage: int
    offload: Offload
    checkpointing: Checkpointing
    ratio: float = 1.0

    @property
    def label(self) -> str:
        parts = [f"stage {self.stage}"]
        if self.offload is not Offload.NONE:
            parts.append(f"offload {self.offload.value}" + (f" {self.ratio:.0%}" if self.ratio < 1 else ""))
        if self.checkpointing is not Checkpointing.OFF:
            parts.append("checkpointing")
        return ", ".join(parts)


@dataclass(frozen=True)
class Row:
    """A setting and what it takes on one GPU of the cluster.

    Attributes:
        micro_batches: per optimizer step.
        tokens: of one micro-batch.
        model_flops: of one micro-batch without recomputation, for the MFU.
        refused: why the engine does not run it yet; "" if it does.
    """

    setting: Setting
    plan: Plan
    traced: Trace
    memory: StepMemory
    time: StepTime
    cluster: Cluster
    micro_batches: int
    tokens: int
    model_flops: int
    refused: str = ""

    @property
    def slack(self) -> int:
        """Bytes that the allocator reserves above what is allocated."""
        return slack_nbytes(self.memory)

    @property
    def reserve(self) -> int:
        """Device bytes that are not allocated: the allocator's slack, context and communicators."""
        return self.slack + int(CONTEXT)

    @property
    def total(self) -> int:
        return self.memory.peak.total + self.reserve

    @property
    def host(self) -> int:
        """Bytes in one node's host memory."""
        return sum(self.memory.tiers.host.values()) * self.cluster.per_node

    @property
    def disk(self) -> int:
        """Bytes on one node's disks."""
        return sum(self.memory.tiers.nvme.values()) * self.cluster.per_node

    @property
    def fits(self) -> bool:
        return self.total <= self.cluster.gpu.memory and self.host <= self.cluster.host_memory

    @property
    def runs(self) -> bool:
        return not self.refused

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        readers = self.plan.mesh.data_parallel_size / self.plan.mesh.world_size
        return self.tokens * self.micro_batches * readers / self.time.seconds

    @property
    def mfu(self) -> float:
        """Model flops utilization: the model's flops, without recomputation, as a share of the card's peak."""
        peak = self.cluster.gpu.peak(_compute_dtype(self.traced, self.plan))
        return self.model_flops * self.micro_batches / self.time.seconds / peak

    @property
    def hours_per_billion(self) -> float:
        """Hours in which the cluster trains on 1e9 tokens."""
        return hours(BILLION, self.cluster.count, self.tokens_per_second)

    @property
    def cost_per_billion(self) -> float | None:
        """USD for 1e9 tokens, None without a price."""
        if self.cluster.price is None:
            return None
        return self.hours_per_billion * self.cluster.count * self.cluster.price

    def traffic(self) -> Mapping[str, int]:
        """Bytes that one GPU receives in a step, by kind of collective; bytes over PCIe are in `links`."""
        traffic = step_traffic(self.plan, micro_batches=self.micro_batches)
        share = (self.plan.dp - 1) / self.plan.dp
        twice = {"all-reduce": 2}
        return {kind: int(n * share * twice.get(kind, 1)) for kind, n in traffic.nbytes.items()}


def slack_nbytes(memory: StepMemory) -> int:
    """What the allocator reserves above what is allocated."""
    return int(ALLOCATOR_FIXED + ALLOCATOR_SHARE * memory.peak.total)


def device_nbytes(memory: StepMemory) -> int:
    """All bytes that a rank takes on its device, with slack, context and communicators."""
    return memory.peak.total + slack_nbytes(memory) + int(CONTEXT)


def hours(tokens: float, gpus: int, tokens_per_second: float) -> float:
    """Hours in which `gpus` GPUs train on `tokens` tokens; `tokens_per_second` is per GPU."""
    return tokens / (3600 * gpus * tokens_per_second)


def settings(*, checkpointing: tuple[Checkpointing, ...] = (Checkpointing.OFF, Checkpointing.ON)) -> Iterator[Setting]:
    """Every setting of the table, those without offload first."""
    for offload in TABLE:
        for stage in STAGES:
            for how in checkpointing:
                if allowed(offload, stage):
                    yield Setting(stage, offload, how)


def make_row(
    work: Workload,
    recipe: Recipe,
    setting: Setting,
    cluster: Cluster,
    *,
    micro_batches: int = 1,
    refused: str = "",
    shard: int | None = None,
    mesh: Mesh | None = None,
    two_levels: bool = False,
    compiling: bool = False,
) -> Row:
    """The row of one setting: its plan, memory and time.

    Args:
        recipe: as a config describes it; the setting's stage and offload replace its own.
        refused: see Row.
        shard: ranks of each subgroup that shards; None if all ranks are one group.
        mesh: the mesh of all ranks, if they are not all data-parallel; `work` is one rank's part of the model then.
        two_levels: collectives run between nodes first, then within each.
        compiling: estimate a model whose blocks are all compiled.
    """
    chosen = recipe_at(recipe, setting, micro_batches)
    plan, traced = work.plan(chosen, mesh or Mesh.data_parallel(cluster.count, shard), how=setting.checkpointing)
    if reaches_peers(cluster) and recipe.peer_copies is not False and peer_problem(plan) is None:
        plan = with_peer_copies(plan)
    if compiling:
        traced = compiled(traced, keeps_inputs_only=setting.checkpointing is not Checkpointing.OFF)
    plain = work.trace(plan, Checkpointing.OFF)
    memory = step_memory(plan, traced)
    time = step_time(plan, traced, cluster, micro_batches=micro_batches, two_levels=two_levels)
    return Row(setting, plan, traced, memory, time, cluster, micro_batches, work.tokens, plain.flops, refused)


def recipe_at(recipe: Recipe, setting: Setting, micro_batches: int) -> Recipe:
    """The recipe with the stage and the offload of a setting, for steps of this many micro-batches."""
    together = recipe.policy.micro_batches > 1
    accumulate = not together and (recipe.policy.accumulate or micro_batches > 1)
    policy = replace(recipe.policy, accumulate=accumulate, micro_batches=micro_batches if together else 1)
    axes, row = recipe.sharding.axes, STAGES[setting.stage]
    row = row.over(axes) if recipe.gradient_codes is None else replace(row, axes=axes)
    return gpu_recipe(replace(recipe, sharding=row, policy=policy), setting.offload, setting.ratio)


def reaches_peers(cluster: Cluster) -> bool:
    """Whether the engine copies between GPUs, since all reach each other's memory: on one node with NVLink."""
    return cluster.nodes == 1 and cluster.count > 1 and cluster.gpu.link.startswith("NVLink")


def _compute_dtype(traced: Trace, plan: Plan) -> torch.dtype:
    """The dtype of most of the arithmetic; if there is none, of most parameters."""
    flops: dict[torch.dtype, int] = {}
    for kernel, count in total_kernels(traced.segments).items():
        flops[kernel.dtype] = flops.get(kernel.dtype, 0) + kernel.flops * count
    if any(flops.values()):
        return max(flops, key=lambda dtype: flops[dtype])
    sizes: dict[str, int] = {}
    for _, group in plan.groups():
        sizes[group.shown_dtype] = sizes.get(group.shown_dtype, 0) + group.layout.numel
    return torch_dtype(max(sizes, key=lambda dtype: sizes[dtype]))
