"""The codes of weights in fp8, made anew of their master weights whenever these were written.

    master    [ w1 . . . | w2 . | w3 ]     this rank's part
    largest   [ m1 | m2 | m3 ]             the largest magnitude of each, here; then the maximum over all ranks
    shard     codes of this rank's part, with the scales that follow from these

So the codes are those of the whole weight cast at once, at any number of ranks. One small all-reduce per step, counted
in the plan's traffic. Rejected: codes written by the optimizer's kernel; their scale depends on all of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.oplog import OperationLog
from zeroshard.engine.memory.scaled_group import ScaledGroup
from zeroshard.engine.memory.unit import Unit
from zeroshard.engine.memory.update_view import update_param, update_range
from zeroshard.fp8.cast import VALUES, has_kernels, scale_and_unscale, to_codes
from zeroshard.plan.groups import UNSCALE_STRIDE
from zeroshard.tiers import values_of

LABEL = "(fp8 scales)"


class ScaledWeights:
    """All groups of a model that rest in fp8.

    Args:
        everyone: over all ranks of the plan.
        readable: whether a forward or backward is running, in which values may be read.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        device: torch.device,
        everyone: Collectives,
        log: OperationLog,
        readable: Callable[[], bool],
    ) -> None:
        self._everyone, self._log = everyone, log
        self._groups = [group for unit in units for group in unit.groups if isinstance(group, ScaledGroup)]
        self.units = [unit.index for unit in units if any(isinstance(group, ScaledGroup) for group in unit.groups)]
        whole = [units[index] for index in self.units if units[index].rests_whole]
        self.in_parts = [unit.index for unit in whole if unit.plan.stepped_in_shards]
        """Units that rest whole, of which each rank makes the codes of its part."""
        count = sum(len(group.plan.layout.segments) for group in self._groups)
        self._largest = torch.zeros(count, dtype=torch.float32, device=device)
        # Products take the address of one, which has to be a multiple of 16 bytes.
        self._unscales = torch.ones((count, UNSCALE_STRIDE), dtype=torch.float32, device=device)
        self._parts: list[_Part] = []
        first = 0
        for group in self._groups:
            end = first + len(group.plan.layout.segments)
            group.adopt_scales(self._unscales[first:end, :1], readable)
            self._parts.append(_Part(group, self._largest[first:end], first))
            first = end

    @torch.no_grad()
    def refresh(self) -> None:
        """Master weights were written on the compute stream: make codes of them. Called by all ranks."""
        self._largest.zero_()
        for part in self._parts:
            part.find_largest()
        if self._everyone.size > 1:
            self._log.record("all-reduce", LABEL, self._largest.nbytes)
            self._everyone.wait(self._everyone.all_reduce(self._largest, LABEL, op=dist.ReduceOp.MAX))
        scales, unscales = scale_and_unscale(self._largest, VALUES)
        self._unscales.copy_(unscales[:, None])
        for part in self._parts:
            part.write_codes(scales)

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest magnitudes of all parameters, and what turns their codes into values."""
        return self._largest, self._unscales

    def drop_codes(self) -> None:
        """Drop the codes of all groups: the model is closed."""
        for group in self._groups:
            group.drop_all_codes()


class _Part:
    """What one rank updates of a group, and the largest magnitudes of its parameters."""

    def __init__(self, group: ScaledGroup, largest: torch.Tensor, first: int) -> None:
        assert group.master is not None
        self._master = values_of(group.master)
        self._group, self._largest, self._first = group, largest, first
        self._pieces = group.plan.layout.pieces(*update_range(group))
        self._tiles = _tiles(group, self._pieces) if group.device.type == "cuda" and has_kernels() else None

    def find_largest(self) -> None:
        """Write the largest magnitudes of what is here; 0 for a parameter of which nothing is."""
        if self._tiles is not None:
            _kernels().find_largest(self._master, self._tiles, self._largest)
            return
        for index, low, high in self._pieces:
            self._largest[index] = self._master[low:high].abs().amax()

    def write_codes(self, scales: torch.Tensor) -> None:
        """Write the codes of what is here; `scales`, those of all parameters, belong to the largest magnitudes."""
        codes = update_param(self._group)  # looked up now: state that was offloaded for a while has other addresses
        if self._tiles is not None:
            _kernels().write_codes(self._master, self._tiles, self._largest, codes)
            return
        for index, low, high in self._pieces:
            codes[low:high].copy_(to_codes(self._master[low:high], scales[self._first + index], VALUES))


def _tiles(group: ScaledGroup, pieces: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """For each tile of the part the number of its parameter; -1 where there is none. Parameters begin at tiles."""
    size = _kernels().TILE
    start, end = update_range(group)
    tiles = torch.full((-(-(end - start) // size),), -1, dtype=torch.int32)
    for index, low, high in pieces:
        assert low % size == 0, "parameters and shards begin at multiples of 256 bytes"
        tiles[low // size : -(-high // size)] = index
    return tiles.to(group.device)


@cache
def _kernels() -> ModuleType:
    from zeroshard.fp8 import shard_kernels

    return shard_kernels
