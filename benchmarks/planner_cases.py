"""The configurations by which the planner is judged, as the planner sees them: its row of the benchmarks' own model.

Rejected: describing each case by a config. The benchmarks train through recipes, and a config in between could differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from benchmarks.llama import SIZES, Llama
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.offload import Offload as HostState
from zeroshard.plan.policy import ExecutionPolicy, HostUpdate
from zeroshard.planner.machine.hardware import Cluster
from zeroshard.planner.predict.cost import kernels_seconds
from zeroshard.planner.predict.measured import Measured, row_label
from zeroshard.planner.predict.rows import Row, Setting, make_row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.model_trace import total_kernels
from zeroshard.planner.trace.sources import ModelSource
from zeroshard.planner.trace.workload import Workload

ALL_MEMORY = 2**60
WHOLE_GRADIENTS = ("1c03287",)
"""Commits whose stage 1 kept whole gradients at one micro-batch a step."""
RECIPE = Recipe(
    precision=Precision("bfloat16"),
    policy=ExecutionPolicy(clip_norm=1.0, overlap_step=True, prefetch=1, cast_inputs="bfloat16"),
)
"""As the benchmarks train: bf16, AdamW, clipped."""


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        offload: that of benchmarks.engines: none, streamed, processor or param.
        whole_gradients: stage 1 as it was before it gave up whole gradients where a step has one micro-batch.
    """

    size: str
    stage: int
    samples: int
    checkpointing: bool = False
    offload: str = "none"
    tuned: bool = False
    whole_gradients: bool = False

    def label(self, length: int) -> str:
        batch = f"{self.samples} x {length}"
        return row_label(self.size, self.stage, batch, self.checkpointing, self.tuned, self.offload)


CASES = (
    Case("1b", 3, 4),
    Case("1b", 2, 4),
    Case("1b", 1, 4),
    Case("1b", 3, 1),
    Case("1b", 2, 1),
    Case("1b", 1, 1),
    Case("1b", 3, 4, checkpointing=True),
    Case("1b", 1, 1, checkpointing=True),
    Case("1b", 3, 4, tuned=True),
    Case("1b", 2, 4, offload="streamed"),
    Case("1b", 2, 4, offload="processor"),
    Case("1b", 3, 4, offload="param"),
    Case("7b", 3, 4, checkpointing=True),
    Case("7b", 2, 4, checkpointing=True),
    Case("7b", 1, 4, checkpointing=True),
    Case("7b", 3, 1),
    Case("7b", 2, 1),
    Case("7b", 3, 1, checkpointing=True),
    Case("7b", 3, 4, checkpointing=True, offload="streamed"),
    Case("7b", 3, 4, checkpointing=True, offload="param"),
)
"""What one command measures, the quickest first; what does not fit a machine is left out by what the planner says."""


def source(size: str, *, checkpointing: bool) -> ModelSource:
    """The benchmarks' model, with its own checkpointing."""

    def batch(_: nn.Module, samples: int, length: int) -> dict[str, torch.Tensor]:
        return {name: torch.empty(samples, length, dtype=torch.int64) for name in ("ids", "targets")}

    return ModelSource(size, lambda: Llama(SIZES[size], checkpointing=checkpointing), batch)


@cache
def workload(size: str, samples: int, length: int, checkpointing: bool) -> Workload:
    return Workload(source(size, checkpointing=checkpointing), samples, length)


def predict(case: Case, length: int, cluster: Cluster) -> Row:
    """The planner's row of a case."""
    policy = replace(RECIPE.policy, spare_nbytes=ALL_MEMORY if case.tuned else 0)
    offload = Offload.NONE if case.offload == "none" else Offload.CPU_PARAM if case.offload == "param" else Offload.CPU
    update = HostUpdate.PROCESSOR if case.offload == "processor" else HostUpdate.STREAMED
    recipe = replace(RECIPE, policy=policy, offload=HostState(update=update))
    if case.whole_gradients:
        recipe = replace(recipe, transient_gradients=False)
    work = workload(case.size, case.samples, length, case.checkpointing)
    return make_row(work, recipe, Setting(case.stage, offload, Checkpointing.OFF), cluster)


def case_of(found: Measured) -> Case:
    """The case of a measured row; that of the floor stands for its model."""
    whole = found.stage == 1 and found.commit in WHOLE_GRADIENTS
    return Case(found.model, found.stage or 0, found.samples, found.checkpointing, found.offload, found.tuned, whole)


def floor_seconds(row: Row) -> float:
    """Forward and backward of a row's model alone, on one of its GPUs."""
    kernels = total_kernels(row.traced.segments)
    return max(kernels_seconds(row.cluster, kernels), kernels.total() * row.cluster.efficiency.host_launch)
