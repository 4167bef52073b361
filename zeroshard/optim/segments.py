"""Pieces of regions, and vectors with one value per parameter, for updates that treat each parameter by itself.

A flag is a parameter's position among all trainable parameters, in plan order. The host knows the optimizer group of a
flag, but not whether its parameter is updated in a step: that is known on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.regions import Region


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that is in a region.

    Attributes:
        flag: the parameter's position among all trainable parameters.
        index: its segment in the region's layout.
        group: its optimizer group.
        cut: its elements in the region.
    """

    flag: int
    index: int
    group: int
    cut: slice


def pieces_of(region: Region) -> Iterator[Piece]:
    """The pieces of a region whose parameters the optimizer has."""
    for index, low, high in region.pieces:
        if region.groups[index] >= 0:
            yield Piece(region.first_flag + index, index, region.groups[index], slice(low, high))


class Flags:
    """Vectors over the flags of some regions, whose flags count from 0.

    Attributes:
        count: number of flags.
        owned: bool (count,), whether the optimizer has the parameter.
        steps: float64 (count,), updates so far.
    """

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        group_of = [group for region in regions for group in region.groups]
        self.count = len(group_of)
        self._group_of = torch.tensor(group_of, dtype=torch.int64).to(device)
        self.owned = self._group_of >= 0
        self.steps = torch.zeros(self.count, dtype=torch.float64, device=device)

    def belongs_to(self, group: int) -> torch.Tensor:
        """bool (flags,): whether a flag's parameter is in optimizer group `group`."""
        return self._group_of == group

    def value_of(self, groups: Sequence[Mapping[str, Any]], name: str) -> torch.Tensor:
        """float64 (flags,): a hyper-parameter of each flag's group."""
        found = torch.zeros_like(self.steps)
        for index, hyper in enumerate(groups):
            if name in hyper:
                found = torch.where(self.belongs_to(index), float(hyper[name]), found)
        return found


def refuse_split(regions: Sequence[Region], name: str) -> None:
    """Raises PlanError if master weights are a remainder beside the parameters, which only Adam's kernel supports."""
    for region in regions:
        if region.master.dtype == torch.int16:
            raise PlanError(
                f"{name} needs whole master weights, but the plan keeps those of {region.label} as a 16-bit remainder: "
                f'write Precision(master="float32") into the recipe'
            )
