"""The codes of weights in fp8, made anew of their master weights whenever these were written.

    master    [ w1 . . . | w2 . | w3 ]     this rank's part
    largest   [ m1 | m2 | m3 ]             the largest magnitude of each, here; then the maximum over all ranks
    shard     codes of this rank's part, with the scales that follow from these

With scales by block, each block of a weight has its largest magnitude, and the border of two ranks' parts cuts blocks.
So the codes are those of the whole weight cast at once, at any number of ranks. One small all-reduce per step, counted
in the plan's traffic. Rejected: codes written by the optimizer's kernel; their scale depends on all of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.oplog import OperationLog
from zeroshard.engine.core.scaled_part import Part, part_of
from zeroshard.engine.memory.scaled_group import ScaledGroup
from zeroshard.engine.memory.unit import Unit
from zeroshard.fp8.cast import VALUES, scale_and_unscale
from zeroshard.plan.groups import UNSCALE_STRIDE, GroupPlan

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
        count = sum(sum(group.plan.scale_counts) for group in self._groups)
        self._largest = torch.zeros(count, dtype=torch.float32, device=device)
        # Products take the address of a parameter's first one, which has to be a multiple of 16 bytes.
        width = 1 if self._groups[0].plan.scale_block else UNSCALE_STRIDE
        self._unscales = torch.ones((count, width), dtype=torch.float32, device=device)
        self._parts: list[Part] = []
        first = 0
        for group in self._groups:
            end = first + sum(group.plan.scale_counts)
            group.adopt_scales(_by_parameter(group.plan, self._unscales[first:end]), readable)
            self._parts.append(part_of(group, slice(first, end)))
            first = end

    @torch.no_grad()
    def refresh(self) -> None:
        """Master weights were written on the compute stream: make codes of them. Called by all ranks."""
        self._largest.zero_()
        for part in self._parts:
            part.find_largest(self._largest)
        if self._everyone.size > 1:
            self._log.record("all-reduce", LABEL, self._largest.nbytes)
            self._everyone.wait(self._everyone.all_reduce(self._largest, LABEL, op=dist.ReduceOp.MAX))
        scales, unscales = scale_and_unscale(self._largest, VALUES)
        self._unscales.copy_(unscales[:, None])
        for part in self._parts:
            part.write_codes(self._largest, scales)

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest magnitudes of all parameters or blocks, and what turns their codes into values."""
        return self._largest, self._unscales

    def drop_codes(self) -> None:
        """Drop the codes of all groups: the model is closed."""
        for group in self._groups:
            group.drop_all_codes()


def _by_parameter(plan: GroupPlan, unscales: torch.Tensor) -> list[torch.Tensor]:
    """The unscales of a group by parameter: of shape (1,), or a matrix with one for each block."""
    if not plan.scale_block:
        return [unscale[:1] for unscale in unscales]
    side, counts = plan.scale_block, plan.scale_counts
    starts = accumulate(counts, initial=0)
    return [
        unscales.view(-1)[start:][: segment.numel // side**2].view(*(size // side for size in segment.shape))
        for segment, start in zip(plan.layout.segments, starts, strict=False)
    ]
