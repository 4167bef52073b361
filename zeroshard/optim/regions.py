"""What an optimizer step updates: this rank's part of each flat group, divided into runs with equal hyper-parameters.

Parameters with different hyper-parameters may be in one flat group: groups with and without decay alternate in a
buffer, and a step updates maximal runs of consecutive active segments with the same optimizer group and step count.
Padding inside a run is updated, too: its gradients are zero and its values stay zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zeroshard.mesh import DATA, Axes
from zeroshard.plan.placement import Blocks
from zeroshard.sharding.layout import FlatLayout
from zeroshard.tiers import Row, RowInPlace


@dataclass(frozen=True)
class Run:
    """Elements [start, end) of a region that are updated together.

    Attributes:
        group: the optimizer group.
        step: the number of this update, counted from 1.
    """

    start: int
    end: int
    group: int
    step: int


@dataclass
class Region:
    """The part of one flat group that this rank updates.

    Attributes:
        label: unit and dtype, for messages.
        layout, start: the group's layout and the element at which this region begins.
        master: master weights (n,): float32 or float64, or the int16 remainder of split ones; or 16-bit parameters that
            are updated themselves.
        param: the compute-dtype parameters (n,) that are written after the master weights; None if `master` is them.
        state_dtype: dtype of the update's state.
        grad: returns the reduced gradients (n,); they may have another address in each step.
        first_flag: position of the group's first parameter among all trainable parameters.
        groups: optimizer group of each segment; -1 if the optimizer does not have the parameter.
        axes: mesh axes over which the group's layout is divided.
        counts: whether this rank counts the region in sums over all ranks, so that each element counts once.
        divided: whether this region is one rank's shard; else every rank updates the whole group.
        allocate: allocates rows for the update's state; None if that rests on the device.
        off_device: which of 'master', 'param' and 'grad' rest off the device.
        row: where `master` rests if it is not in memory; `master` then has its size and dtype, but no elements.
        param_row: where `param` rests if it is not in memory, as `row` for `master`; it is only written.
        window: host memory in which state that is not in memory is updated, `window_numel` elements at a time; None if
            all of it is in memory.
        whole_grad: returns this rank's whole gradients before any reduce; None if the plan shards them.
        blocks: the blocks in which the moments are kept in few bits; None if they are not.
        owners: per segment, the rank along the axis that computes the update of that matrix; () if updates are
            element-wise.
        factor_ranks: per segment, the rank of the factors from which it is updated; () if it is not.
    """

    label: str
    layout: FlatLayout
    start: int
    master: torch.Tensor
    param: torch.Tensor | None
    grad: Callable[[], torch.Tensor]
    first_flag: int
    groups: Sequence[int]
    axes: Axes = DATA
    counts: bool = True
    divided: bool = False
    blocks: Blocks | None = None
    owners: Sequence[int] = ()
    factor_ranks: Sequence[int] = ()
    state_dtype: torch.dtype = torch.float32
    whole_grad: Callable[[], torch.Tensor] | None = None
    allocate: Callable[[int, torch.dtype], Row] | None = None
    off_device: frozenset[str] = frozenset()
    row: Row | None = None
    param_row: Row | None = None
    window: torch.Tensor | None = None
    window_numel: int = 0

    def __post_init__(self) -> None:
        self.pieces = self.layout.pieces(self.start, self.start + self.master.numel())

    def new_state(self) -> Row:
        """Zeros of `state_dtype`, one per element of the region, in the memory or on the disk of the update's state."""
        if self.allocate is not None:
            return self.allocate(self.master.numel(), self.state_dtype)
        return RowInPlace(torch.zeros_like(self.master, dtype=self.state_dtype))

    @property
    def master_row(self) -> Row:
        """The row in which `master` rests."""
        return RowInPlace(self.master) if self.row is None else self.row

    @property
    def gathers_read_row(self) -> bool:
        """Whether gathers read a row that updates of this region write, and that is not in memory."""
        return self.param_row is not None or (self.row is not None and self.param is None)

    @property
    def without_master(self) -> bool:
        """Whether 16-bit parameters are updated themselves, since they have no master weights."""
        return self.master.dtype in (torch.bfloat16, torch.float16)

    def runs(self, active: Sequence[bool], steps: Sequence[int]) -> list[Run]:
        """The runs to update: `active` and `steps` (updates so far) are per segment of the group."""
        found: list[Run] = []
        previous = -2
        for index, low, high in self.pieces:
            group = self.groups[index]
            if group < 0 or not active[index]:
                continue
            step = steps[index] + 1
            last = found[-1] if found else None
            if last is not None and index == previous + 1 and (last.group, last.step) == (group, step):
                found[-1] = Run(last.start, high, group, step)
            else:
                found.append(Run(low, high, group, step))
            previous = index
        return found

    def clear_padding(self) -> None:
        """Zero the padding in `param`, of which all elements will be written to its row."""
        assert self.param is not None
        at = 0
        for _, low, high in (*self.pieces, (0, self.param.numel(), 0)):
            self.param[at:low].zero_()
            at = high

    def refresh_untouched(self, active: Sequence[bool]) -> None:
        """Write `param` from `master` for parameters that are not updated: `param` may use the gradients' memory.

        Args:
            active: of all trainable parameters, whether each is updated.
        """
        for index, low, high in self.pieces:
            touched = active[self.first_flag + index] and self.groups[index] >= 0
            if self.param is not None and not touched:
                self.param[low:high].copy_(self.master[low:high])
