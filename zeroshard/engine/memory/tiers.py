"""Opens the memory of each tier that a plan uses on this rank. The plan says which state rests on which tier.

    Tier.DEVICE   DeviceMemory            Tier.HOST   HostMemory, of the size that the plan counts
    Tier.NVME     NvmeMemory, in the folders that the plan names
    others        made by factories that the engine is given (build_handle's `tiers`), which may also replace NvmeMemory

Reduces write gradients directly, so gradients must lie in place. Parameters, master weights and moments may rest in a
tier that can only be read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.engine.memory.disk_memory import open_disk_memory, open_on_all_ranks, rests_on_disk
from zeroshard.engine.memory.host_memory import open_host_memory
from zeroshard.errors import PlanError
from zeroshard.plan.placement import StateKind, Tier
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import HostUpdate
from zeroshard.tiers import RowInPlace, TierMemory

Tiers = Mapping[Tier, TierMemory]
TierFactory = Callable[[Plan, torch.device], TierMemory]
"""Makes the memory of a tier on this rank. Raises PlanError if the machine has less than the plan needs."""


class DeviceMemory:
    """Memory from torch's allocator. A TierMemory, whose rows lie in place."""

    pinned = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.used = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> RowInPlace:
        """See TierMemory."""
        self.used += numel * dtype.itemsize
        return RowInPlace(torch.zeros(numel, dtype=dtype, device=self._device))

    def reserve(self, nbytes: int) -> None:
        """See TierMemory; torch's allocator takes what is asked for."""

    def close(self) -> None:
        """See TierMemory; rows in place live on with their tensors."""


def open_tiers(plan: Plan, device: torch.device, given: Mapping[Tier, TierFactory], control: Collectives) -> Tiers:
    """The memory of each tier that the plan uses; called by all ranks.

    Args:
        given: factories for tiers other than device and host, which replace this package's own.
        control: the communicator of all ranks, each of which opens files of its own.

    Raises:
        PlanError: the machine has too little memory, or a tier has no factory.
    """
    found: dict[Tier, TierMemory] = {Tier.DEVICE: DeviceMemory(device)}
    if plan.off_device:
        found[Tier.HOST] = open_host_memory(plan, device)
    for tier, factory in given.items():
        found[tier] = factory(plan, device)
    if Tier.NVME not in found and rests_on_disk(plan):
        found[Tier.NVME] = open_on_all_ranks(lambda: open_disk_memory(plan, control.rank), control, device)
    return found


def check_tiers(plan: Plan, given: Mapping[Tier, TierFactory]) -> None:
    """Check the tiers before anything is allocated. Raises PlanError for a tier without memory."""
    for unit, group in plan.groups():
        for kind in StateKind:
            held = group.placement(kind)
            if held is None or held.tier in (Tier.DEVICE, Tier.HOST):
                continue
            where = f"unit {unit.label!r}: {kind.value} rests on '{held.tier.value}'"
            if held.tier not in given and plan.policy.spill is None:
                raise PlanError(
                    f"{where}, but no folder is named; make the plan with Offload(..., spill=Spill(('/local/disk',)))"
                )
            if kind is StateKind.PARAM and group.update is HostUpdate.STREAMED:
                raise PlanError(f"{where}, which the processor has to update; leave Offload.update open")
            if kind is StateKind.GRAD:
                raise PlanError(f"{where}, where all other state can rest; use 'host' or 'device' for it")
