"""The offloads that are rows of the table, and the recipes that the engine would take for them.

                    master weights, moments     sharded parameters
    none            device                      device
    cpu             host                        device
    cpu+param       host                        host
    nvme            disk                        device
    nvme+param      disk                        disk
    nvme, param cpu and cpu, param nvme: only where a config asks for it

The plan is the one that the engine executes. State in host memory is streamed through the GPU or updated by the
processor; state on disk is updated by the processor, in windows of host memory. Moments in few bits always pass the
GPU, from disk through such windows. Gradients are offloaded with the
optimizer's state, always to host memory.
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
    NVME_PARAM = "nvme+param"
    NVME_CPU_PARAM = "nvme, param cpu"
    CPU_NVME_PARAM = "cpu, param nvme"

    @property
    def states(self) -> Tier:
        """Where master weights and moments rest."""
        return _TIERS[self][0]

    @property
    def parameters(self) -> Tier:
        """Where sharded parameters rest."""
        return _TIERS[self][1]

    @staticmethod
    def of(states: Tier, parameters: Tier) -> Offload:
        """The offload for two tiers; there is none that offloads parameters and leaves state on the device."""
        return next(offload for offload, places in _TIERS.items() if places == (states, parameters))


_TIERS = {
    Offload.NONE: (Tier.DEVICE, Tier.DEVICE),
    Offload.CPU: (Tier.HOST, Tier.DEVICE),
    Offload.CPU_PARAM: (Tier.HOST, Tier.HOST),
    Offload.NVME: (Tier.NVME, Tier.DEVICE),
    Offload.NVME_PARAM: (Tier.NVME, Tier.NVME),
    Offload.NVME_CPU_PARAM: (Tier.NVME, Tier.HOST),
    Offload.CPU_NVME_PARAM: (Tier.HOST, Tier.NVME),
}
TABLE = (Offload.NONE, Offload.CPU, Offload.CPU_PARAM, Offload.NVME, Offload.NVME_PARAM)
"""The offloads that are rows of every table."""


def allowed(offload: Offload, stage: int) -> bool:
    """Whether a stage can have an offload: of optimizer state from stage 1 on, of parameters at stage 3 only."""
    if offload is Offload.NONE:
        return True
    return stage >= 3 if offload.parameters is not Tier.DEVICE else stage >= 1


def gpu_recipe(recipe: Recipe, offload: Offload, ratio: float = 1.0) -> Recipe:
    """The recipe that the engine would take on GPUs for this offload, with its open choices made.

    If the row offloads, the recipe's own choice of who updates the state is kept.

    Args:
        ratio: share of the optimizer's state that is offloaded, if parameters are not.
    """
    # Adam's device kernel, with moments in float32, can update split master weights and streamed state.
    kernel = recipe.moments == 2 and recipe.blocks is None
    if offload is Offload.NONE:
        return for_gpu(replace(recipe, offload=None), split_master=kernel)
    asked = recipe.offload or HostState()
    on_disk = Tier.NVME in (offload.states, offload.parameters)
    streams = (kernel and not on_disk) or recipe.blocks is not None  # else the processor updates what is on disk
    update = asked.update or (HostUpdate.STREAMED if streams else HostUpdate.PROCESSOR)
    away = offload.parameters is not Tier.DEVICE
    host = replace(
        asked,
        ratio=1.0 if away else ratio,
        param=away,
        update=update,
        tier=offload.states,
        param_tier=offload.parameters if away else Tier.HOST,
        spill=asked.spill if on_disk else None,
        host_ratio=min(asked.host_ratio, 1.0 if away else ratio) if offload.states is Tier.NVME else 0.0,
    )
    return for_gpu(replace(recipe, offload=host), split_master=kernel and update is HostUpdate.STREAMED)
