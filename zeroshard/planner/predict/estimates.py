"""DeepSpeed's memory estimators under their own names; the figures come from plans.

    estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=1)
    estimate_zero2_model_states_mem_needs_all_cold(total_params=7e9, num_gpus_per_node=8)
    estimate_zero3_model_states_mem_needs_all_live(model, ...)
    estimate_zero3_model_states_mem_needs_all_cold(total_params=7e9, largest_layer_params=131e6, ...)

Each prints a table and returns its rows. "live" takes a module, "cold" takes numbers. The figures are state and slots
of the plan that the engine would run on GPUs, bf16 with AdamW, per GPU and per node's host memory. Activations are not
included; `zeroshard plan` predicts them. DeepSpeed multiplies host memory by a factor (1.5); here it is counted, so
`additional_buffer_factor` is accepted and has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from zeroshard.errors import PlanError
from zeroshard.plan.builder import Precision, Recipe, build_plan
from zeroshard.plan.placement import STAGES, Tier
from zeroshard.plan.report import human_bytes
from zeroshard.planner.predict.memory import slots_nbytes, tier_bytes, transient_nbytes
from zeroshard.planner.predict.tiers import Offload, allowed, gpu_recipe
from zeroshard.sharding.units import ParameterSpec, UnitSpec, find_units

TABLE_WIDTH = 100


@dataclass(frozen=True)
class Estimate:
    """Bytes of state and slots under one setting: on each GPU, and in each node's host memory."""

    stage: int
    offload: Offload
    per_gpu: int
    per_host: int


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[Estimate]:
    """State bytes of a module at stage 2, with and without offload; printed as a table too."""
    return _all(find_units(model), 2, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[Estimate]:
    """State bytes of a module at stage 3, with and without offload; printed as a table too."""
    return _all(find_units(model), 3, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[Estimate]:
    """State bytes of a model with `total_params` parameters at stage 2; printed as a table too."""
    return _all(_units(total_params, total_params / 32), 2, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[Estimate]:
    """State bytes of a model with `total_params` parameters at stage 3, in units of at most `largest_layer_params`.

    They are printed as a table too.
    """
    return _all(_units(total_params, largest_layer_params), 3, num_gpus_per_node, num_nodes)


def estimates(units: Sequence[UnitSpec], stage: int, per_node: int, nodes: int) -> list[Estimate]:
    """State and slots per GPU and per node's host, for each offload to host memory that the stage allows."""
    if per_node < 1 or nodes < 1:
        raise PlanError(f"{per_node} GPUs on each of {nodes} nodes: both must be 1 or more")
    found: list[Estimate] = []
    for offload in Offload:
        if not allowed(offload, stage) or Tier.NVME in (offload.states, offload.parameters):
            continue
        recipe = gpu_recipe(Recipe(sharding=STAGES[stage], precision=Precision("bfloat16")), offload)
        plan = build_plan(units, recipe, per_node * nodes)
        tiers = tier_bytes(plan)
        gradients = sum(transient_nbytes(plan, unit) for unit in range(len(plan.units)))
        device = sum(tiers.device.values()) + slots_nbytes(plan) + gradients
        found.append(Estimate(stage, offload, device, sum(tiers.host.values()) * per_node))
    return found


def _all(units: Sequence[UnitSpec], stage: int, per_node: int, nodes: int) -> list[Estimate]:
    found = estimates(units, stage, per_node, nodes)
    numel = sum(torch.Size(parameter.shape).numel() for unit in units for parameter in unit.parameters)
    table = Table(title=f"State of {numel:,} parameters at stage {stage} on {nodes} x {per_node} GPUs, no activations")
    for name in ("offload", "per GPU", "per host"):
        table.add_column(name, justify="left" if name == "offload" else "right")
    for row in found:
        table.add_row(row.offload.value, human_bytes(row.per_gpu), human_bytes(row.per_host) if row.per_host else "-")
    Console(width=TABLE_WIDTH).print(table)
    return found


def _units(total: float, largest: float) -> list[UnitSpec]:
    """A model of `total` parameters in equal units no larger than `largest`."""
    if not 1 <= largest <= total:
        raise PlanError(f"a layer of {largest:g} parameters in a model of {total:g}: it is between 1 and the whole")
    count = max(1, -(-int(total) // int(largest)))
    sizes = [int(total) // count + (1 if index < int(total) % count else 0) for index in range(count)]
    blocks = [
        UnitSpec(f"layer{index}", (ParameterSpec(f"layer{index}.weight", (size,), torch.float32),))
        for index, size in enumerate(sizes)
    ]
    return [UnitSpec("", ()), *blocks]
