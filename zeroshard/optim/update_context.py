"""What an update is made from: the regions of this rank, and the communicators to the other ranks.

Element-wise rules need the regions only. Updates that need whole parameters (a norm, a matrix) communicate, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.mesh import Axes
from zeroshard.optim.regions import Region


@dataclass(frozen=True)
class UpdateContext:
    """What an update is made from.

    Attributes:
        regions: in plan order, this rank's part of each trainable flat group.
        device: the device of the regions.
        control: the communicator of all data-parallel ranks, for collectives that are not legs of the plan.
        axes: communicators, by the mesh axes over which regions are divided.
    """

    regions: Sequence[Region]
    device: torch.device
    control: Collectives
    axes: Mapping[Axes, Collectives]

    def counts(self, region: Region) -> bool:
        """Whether this rank counts a region in sums over all ranks, so that each element counts once.

        If no region is divided there is no sum over ranks, since each rank has all elements.
        """
        if not region.divided:
            return self.control.rank == 0 or not self.divided
        return region.counts

    @property
    def divided(self) -> bool:
        """Whether any region is one rank's shard."""
        return any(region.divided for region in self.regions)
