"""What one rank updates of a group in fp8: finds the largest magnitudes of its parameters, or of their blocks, and
writes the codes of its part, on a GPU by kernels.

    TensorPart    one largest magnitude for each parameter
    BlockPart     one for each block of 128 x 128 weights; the parts of a block on two ranks have its scale
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from types import ModuleType

import torch

from zeroshard.engine.memory.scaled_group import ScaledGroup
from zeroshard.engine.memory.update_view import update_param, update_range
from zeroshard.fp8.cast import VALUES, has_kernels, to_codes
from zeroshard.tiers import values_of


def part_of(group: ScaledGroup, own: slice) -> Part:
    """The part of a group that this rank updates; `own` are its scales among all."""
    return BlockPart(group, own) if group.plan.scale_block else TensorPart(group, own)


class Part(ABC):
    """The master weights that this rank updates of a group, and their codes.

    Args:
        own: the group's scales among those of all groups.
    """

    def __init__(self, group: ScaledGroup, own: slice) -> None:
        assert group.master is not None
        self._master = values_of(group.master)
        self._group, self._own = group, own
        self._range = update_range(group)
        self._pieces = group.plan.layout.pieces(*self._range)
        self._by_kernel = group.device.type == "cuda" and has_kernels()

    @abstractmethod
    def find_largest(self, largest: torch.Tensor) -> None:
        """Write the largest magnitudes of what is here to those of all groups; others are 0."""

    @abstractmethod
    def write_codes(self, largest: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the codes of what is here; the largest magnitudes, and the scales of them, are those of all ranks."""

    @property
    def _codes(self) -> torch.Tensor:
        return update_param(self._group)  # looked up now: state that was offloaded for a while has other addresses


class TensorPart(Part):
    """Parameters with one scale each."""

    def __init__(self, group: ScaledGroup, own: slice) -> None:
        super().__init__(group, own)
        self._tiles = _tiles(group, self._pieces) if self._by_kernel else None

    def find_largest(self, largest: torch.Tensor) -> None:
        """See Part."""
        found = largest[self._own]
        if self._tiles is not None:
            _kernels().find_largest(self._master, self._tiles, found)
            return
        for index, low, high in self._pieces:
            found[index] = self._master[low:high].abs().amax()

    def write_codes(self, largest: torch.Tensor, scales: torch.Tensor) -> None:
        """See Part."""
        codes = self._codes
        if self._tiles is not None:
            _kernels().write_codes(self._master, self._tiles, largest[self._own], codes)
            return
        for index, low, high in self._pieces:
            codes[low:high].copy_(to_codes(self._master[low:high], scales[self._own][index], VALUES))


class BlockPart(Part):
    """Parameters with a scale for each block.

    A shard consists of rows of blocks, 128 values each, since parameters and shards begin at multiples of 256.
    """

    def __init__(self, group: ScaledGroup, own: slice) -> None:
        super().__init__(group, own)
        self._side = group.plan.scale_block
        self._first = list(accumulate(group.plan.scale_counts, initial=0))
        self._blocks = _blocks(group, self._first) if self._by_kernel else None

    def find_largest(self, largest: torch.Tensor) -> None:
        """See Part. On a GPU, the codes of blocks of which no other rank has a part are written at once."""
        found = largest[self._own]
        if self._blocks is not None:
            _kernels().cast_own_blocks(self._master, *self._blocks, found, self._codes)
            return
        for index, low, high in self._pieces:
            rows = self._master[low:high].view(-1, self._side).abs().amax(dim=1)
            found.scatter_reduce_(0, self._scales_of_rows(index, low, high), rows, "amax")

    def write_codes(self, largest: torch.Tensor, scales: torch.Tensor) -> None:
        """See Part."""
        if self._blocks is not None:
            _kernels().cast_cut_blocks(self._master, self._blocks[1], largest[self._own], self._codes)
            return
        codes = self._codes
        for index, low, high in self._pieces:
            scale = scales[self._own][self._scales_of_rows(index, low, high)]
            rows = self._master[low:high].view(-1, self._side)
            codes[low:high].view(-1, self._side).copy_(to_codes(rows, scale[:, None], VALUES))

    def _scales_of_rows(self, index: int, low: int, high: int) -> torch.Tensor:
        """For each 128 values of a piece the number of their block, among those of the group."""
        segment, side = self._group.plan.layout.segments[index], self._side
        start = low + self._range[0] - segment.offset
        rows = torch.arange(start // side, (start + high - low) // side, device=self._master.device)
        across = segment.shape[-1] // side
        return self._first[index] + rows // across // side * across + rows % across


def _tiles(group: ScaledGroup, pieces: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """For each tile of the part the number of its parameter; -1 where there is none. Parameters begin at tiles."""
    size = _kernels().TILE
    start, end = update_range(group)
    tiles = torch.full((-(-(end - start) // size),), -1, dtype=torch.int32)
    for index, low, high in pieces:
        assert low % size == 0, "parameters and shards begin at multiples of 256 bytes"
        tiles[low // size : -(-high // size)] = index
    return tiles.to(group.device)


def _blocks(group: ScaledGroup, first: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that lie in this rank's part, and those that its borders cut, as `shard_kernels` takes them."""
    start, end = update_range(group)
    side, found = group.plan.scale_block, [torch.empty((0, 3), dtype=torch.int64)]
    for segment, scale in zip(group.plan.layout.segments, first, strict=False):
        columns = segment.shape[-1]
        across = columns // side
        block = torch.arange(segment.numel // side**2)
        at = segment.offset - start + block // across * side * columns + block % across * side
        found.append(torch.stack([at, torch.full_like(at, columns), scale + block], dim=1))
    blocks = torch.cat(found)
    last = blocks[:, 0] + (side - 1) * blocks[:, 1] + side
    whole = (blocks[:, 0] >= 0) & (last <= end - start)
    cut = ~whole & (last > 0) & (blocks[:, 0] < end - start)
    return blocks[whole].to(group.device), blocks[cut].to(group.device)


@cache
def _kernels() -> ModuleType:
    from zeroshard.fp8 import shard_kernels

    return shard_kernels
