"""Several updates combined to one: each updates some of the regions, which it numbers from 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from zeroshard.optim.regions import Region
from zeroshard.optim.saved_state import SavedState, Scalar, StatePart
from zeroshard.optim.update_context import UpdateContext
from zeroshard.optim.updates import DeviceUpdate, PiecewiseUpdate, StatefulUpdate, UpdateMethod
from zeroshard.tiers import RowPart

Update = TypeVar("Update", bound=StatefulUpdate)


@dataclass(frozen=True)
class Part(Generic[Update]):
    """One of the combined updates.

    Attributes:
        name: prefix of its state's names.
        members: the numbers of its regions among all regions.
        flags: the positions of its parameters among all trainable parameters.
    """

    name: str
    update: Update
    members: Sequence[int]
    flags: Sequence[int]


def part_of(
    name: str, context: UpdateContext, members: Sequence[int], make: Callable[[UpdateContext], Update]
) -> Part[Update]:
    """A part with some of the context's regions; `make` gets a context of these alone, whose flags count from 0."""
    flags: list[int] = []
    regions: list[Region] = []
    for region in (context.regions[number] for number in members):
        regions.append(replace(region, first_flag=len(flags)))
        flags += range(region.first_flag, region.first_flag + len(region.layout.segments))
    return Part(name, make(replace(context, regions=regions)), members, flags)


class _Parts(SavedState, Generic[Update]):
    """The state of all parts; each name is that in the part, after the part's name and a dot."""

    def __init__(self, parts: Sequence[Part[Update]]) -> None:
        self._parts = parts

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{part.name}.{name}": t for part in self._parts for name, t in part.update.tensors().items()}

    def _part_of(self, region: int) -> tuple[Part[Update], int]:
        return next((part, list(part.members).index(region)) for part in self._parts if region in part.members)

    def state_keys(self, region: int) -> tuple[str, ...] | None:
        """See SavedState."""
        part, place = self._part_of(region)
        return part.update.state_keys(place)

    def value_keys(self, region: int) -> tuple[str, ...] | None:
        """See SavedState."""
        part, place = self._part_of(region)
        return part.update.value_keys(place)

    def elements_per_value(self, region: int, key: str) -> int:
        """See SavedState."""
        part, place = self._part_of(region)
        return part.update.elements_per_value(place, key)

    def state_parts(self) -> Iterator[StatePart]:
        """See SavedState."""
        for part in self._parts:
            for found in part.update.state_parts():
                yield replace(found, region=part.members[found.region])

    def reset_state(self) -> None:
        """See SavedState."""
        for part in self._parts:
            part.update.reset_state()

    def open_part(
        self, region: int, index: int, dtypes: Mapping[str, torch.dtype], scalars: Mapping[str, Scalar]
    ) -> dict[str, RowPart]:
        """See SavedState."""
        part, place = self._part_of(region)
        return part.update.open_part(place, index, dtypes, scalars)


class HostParts(_Parts[UpdateMethod]):
    """A combination of updates that the host controls."""

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        for part in self._parts:
            part.update.apply(coefficient, [active[flag] for flag in part.flags], hyper)


class PiecewiseParts(_Parts[PiecewiseUpdate]):
    """A combination of updates that update each region by itself."""

    def __init__(self, parts: Sequence[Part[PiecewiseUpdate]], regions: Sequence[Region]) -> None:
        super().__init__(parts)
        self.regions = regions
        self._where = {number: (part, place) for part in parts for place, number in enumerate(part.members)}

    def check(self, hyper: Sequence[Mapping[str, Any]]) -> None:
        """See PiecewiseUpdate."""
        for part in self._parts:
            part.update.check(hyper)

    def begin(self, numbers: Sequence[int]) -> None:
        """See PiecewiseUpdate."""
        for part in self._parts:
            part.update.begin([place for number in numbers for one, place in [self._where[number]] if one is part])

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        """See UpdateMethod."""
        for part in self._parts:
            part.update.apply(coefficient, [active[flag] for flag in part.flags], hyper)

    def apply_region(
        self, number: int, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]
    ) -> None:
        """See PiecewiseUpdate."""
        part, place = self._where[number]
        part.update.apply_region(place, coefficient, [active[flag] for flag in part.flags], hyper)


class DeviceParts(_Parts[DeviceUpdate]):
    """A combination of updates that tensors on the device control."""

    def __init__(self, parts: Sequence[Part[DeviceUpdate]], regions: Sequence[Region], device: torch.device) -> None:
        super().__init__(parts)
        self.regions = regions
        self._flags = [torch.tensor(part.flags, dtype=torch.int64).to(device) for part in parts]
        self._where = {number: (part, place) for part in parts for place, number in enumerate(part.members)}

    def prepare(self, coefficient: torch.Tensor, active: torch.Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        """See DeviceUpdate."""
        for part, flags in zip(self._parts, self._flags, strict=True):
            part.update.prepare(coefficient, active[flags], groups)

    def apply(self, number: int) -> None:
        """See DeviceUpdate."""
        part, place = self._where[number]
        part.update.apply(place)
