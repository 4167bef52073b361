"""Offload as rows of the table: what the engine's plan is asked for.

    none        everything on the device
    cpu         master weights, moments and gradients on the host; state streams through the GPU to be updated
    cpu+param   and the parameters' shards too; each gather copies its shard up first
    nvme        as cpu+param, with master weights and moments in files

The plan is the one that the engine executes; on disk the processor updates, in windows of host memory. Gradients
always go down with the optimizer.
(ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857.)
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from zeroshard.plan.builder import Recipe, for_gpu
from zeroshard.plan.offload import Offload as HostState
from zeroshard.plan.placement import Tier
from zeroshard.plan.policy import HostUpdate


class Offload(str, Enum):
    """What rests off the device."""

    NONE = "none"
    CPU = "cpu"
    CPU_PARAM = "cpu+param"
    NVME = "nvme"

    @property
    def states(self) -> Tier:
        """Where master weights and moments rest."""
        return {Offload.NONE: Tier.DEVICE, Offload.NVME: Tier.NVME}.get(self, Tier.HOST)

    @property
    def parameters(self) -> Tier:
        return Tier.HOST if self in (Offload.CPU_PARAM, Offload.NVME) else Tier.DEVICE


def allowed(offload: Offload, stage: int) -> bool:
    """Optimizer states can go from stage 1 up, parameters at stage 3 only."""
    if offload is Offload.NONE:
        return True
    return stage >= 3 if offload.parameters is Tier.HOST else stage >= 1


def gpu_recipe(recipe: Recipe, offload: Offload, ratio: float = 1.0) -> Recipe:
    """The recipe that the engine would take on GPUs for this offload, with what it leaves open decided.

    What the recipe's own offload says of the way of updating is kept where the row offloads at all.

    Args:
        ratio: share of the optimizer's state that goes, where the parameters stay.
    """
    # Adam's, with moments in float32: it takes split master weights, and streamed state.
    kernel = recipe.moments == 2 and recipe.blocks is None
    if offload is Offload.NONE:
        return for_gpu(replace(recipe, offload=None), split_master=kernel)
    asked = recipe.offload or HostState()
    streams = kernel and offload is not Offload.NVME  # the processor updates state on disk, in windows
    update = asked.update or (HostUpdate.STREAMED if streams else HostUpdate.PROCESSOR)
    away = offload.parameters is Tier.HOST
    host = replace(asked, ratio=1.0 if away else ratio, param=away, update=update, tier=offload.states)
    return for_gpu(replace(recipe, offload=host), split_master=kernel and update is HostUpdate.STREAMED)
