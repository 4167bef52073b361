"""Host memory through which state passes for its update where it does not lie in place: one region at a time.

    tier     master m v of region 0 | of region 1 | ...
    window   [ master | m | v ]     brought, updated by the processor, put back

The largest region decides its size, which the plan counts (plan.offload.window_nbytes). Regions whose state lies in
place are given as they are. Rejected: tensors mapped from files, of which the system decides what is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from zeroshard.optim.regions import Region
from zeroshard.plan.offload import aligned
from zeroshard.tiers import Row, finish, in_place


class Windows:
    """Gives regions and their state as tensors, where the processor can work on them.

    Args:
        states: the rows of each region's state.
    """

    def __init__(self, regions: Sequence[Region], states: Sequence[Sequence[Row]]) -> None:
        self._moved: dict[int, list[tuple[Row, torch.Tensor]]] = {}
        self._open = [self._prepared(number, region, states[number]) for number, region in enumerate(regions)]

    def _prepared(self, number: int, region: Region, rows: Sequence[Row]) -> tuple[Region, list[torch.Tensor]]:
        """The region with its tensors, or the places in the window in which these will be."""
        if region.window is None:
            return region, [in_place(row) for row in rows]
        used, moved, places = 0, list[tuple[Row, torch.Tensor]](), list[torch.Tensor]()
        for row in [*rows, *([] if region.row is None else [region.row])]:
            nbytes = row.numel * row.dtype.itemsize
            place = region.window[used : used + nbytes].view(row.dtype)
            used += aligned(nbytes)
            moved.append((row, place))
            places.append(place)
        self._moved[number] = moved
        if region.row is None:
            return region, places
        *state, master = places
        return replace(region, master=master), state

    @contextmanager
    def open(self, number: int) -> Iterator[tuple[Region, list[torch.Tensor]]]:
        """A region and its state. What was moved for it is put back at the end, unless that is an exception."""
        moved = self._moved.get(number, ())
        for arrived in [row.read(0, place) for row, place in moved]:
            finish(arrived)
        yield self._open[number]
        for left in [row.write(0, place) for row, place in moved]:
            finish(left)
