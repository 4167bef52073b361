"""What the planner's tests plan for."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.llama import SIZES, Llama
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.planner.trace.sources import ModelSource

BF16 = Recipe(
    precision=Precision("bfloat16"),
    policy=ExecutionPolicy(clip_norm=1.0, overlap_step=True, prefetch=1, cast_inputs="bfloat16"),
)
"""What the GPU benchmarks train with."""


def benchmark_source(size: str, *, checkpointing: bool = False) -> ModelSource:
    """The model of the GPU benchmarks."""

    def batch(_: nn.Module, samples: int, length: int) -> dict[str, torch.Tensor]:
        return {
            "ids": torch.empty(samples, length, dtype=torch.int64),
            "targets": torch.empty(samples, length, dtype=torch.int64),
        }

    return ModelSource(size, lambda: Llama(SIZES[size], checkpointing=checkpointing), batch)
