"""Units without a model, for plans of any size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import settings

from zeroshard.mesh import Mesh
from zeroshard.plan.builder import Precision, Recipe, build_plan
from zeroshard.plan.placement import STAGES, Sharding
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.sharding.units import ParameterSpec, UnitSpec

relaxed = settings(deadline=None, max_examples=60)
"""No limit of time per example: machines that run tests are busy."""


def blocks(
    count: int, numel: int = 1024, *, root: int = 0, dtype: torch.dtype = torch.float32, trainable: bool = True
) -> list[UnitSpec]:
    """A root of `root` elements and `count` blocks of `numel` each."""

    def unit(name: str, size: int) -> UnitSpec:
        parameters = (ParameterSpec(f"{name or 'root'}.weight", (size,), dtype, trainable),) if size else ()
        return UnitSpec(name, parameters)

    return [unit("", root), *(unit(f"block{index}", numel) for index in range(count))]


def plan_of(
    units: Sequence[UnitSpec],
    row: int | Sharding = 3,
    *,
    dp: int = 2,
    shard: int | None = None,
    precision: Precision | None = None,
    threshold: int = 0,
    moments: int = 2,
    prefetch: int = 1,
    reuse: bool = True,
    accumulate: bool = False,
    spare: int = 0,
) -> Plan:
    """The plan of a ZeRO stage or of a row of the placement table."""
    recipe = Recipe(
        sharding=STAGES[row] if isinstance(row, int) else row,
        precision=precision or Precision(),
        policy=ExecutionPolicy(prefetch=prefetch, reuse=reuse, accumulate=accumulate, spare_nbytes=spare),
        moments=moments,
        persistence_threshold=threshold,
    )
    return build_plan(units, recipe, Mesh.data_parallel(dp, shard))
