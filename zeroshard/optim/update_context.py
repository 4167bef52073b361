"""Where an update works: the regions of this rank, and how it talks to the ranks that hold the rest.

Element-wise rules need the regions only. Those that look at whole parameters (a norm, a matrix) need the others too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.mesh import Axes
from zeroshard.optim.regions import Region


@dataclass(frozen=True)
class UpdateContext:
    """What an update gets to work with.

    Attributes:
        regions: in plan order, this rank's part of each trainable flat group.
        control: the communicator of all data-parallel ranks for what is issued outside of the lists.
        axes: communicators, by the mesh axes over which regions are divided.
    """

    regions: Sequence[Region]
    device: torch.device
    control: Collectives
    axes: Mapping[Axes, Collectives]

    def counts(self, region: Region) -> bool:
        """Whether what this rank has of a region enters a sum over all ranks, so that each element counts once.

        Where nothing is divided there is no sum over ranks: each has it all.
        """
        if not region.divided:
            return self.control.rank == 0 or not self.divided
        return region.counts

    @property
    def divided(self) -> bool:
        """Whether any parameter is spread over several ranks."""
        return any(region.divided for region in self.regions)


def flags_of(regions: Sequence[Region]) -> list[int]:
    """Positions of the regions' parameters among all trainable parameters."""
    return [region.first_flag + index for region in regions for index in range(len(region.layout.segments))]


def renumbered(regions: Sequence[Region]) -> list[Region]:
    """The regions as if they were all there is: flags count from 0. `flags_of` gives the positions they came from."""
    found: list[Region] = []
    first = 0
    for region in regions:
        found.append(replace(region, first_flag=first))
        first += len(region.layout.segments)
    return found
