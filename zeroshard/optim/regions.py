"""What the optimizer step works on: this rank's part of each flat group, cut into runs with equal hyper-parameters.

Hyper-parameters are a table per segment, never a reason for another flat group: a decay and a no-decay group alternate
inside one buffer, and the step visits maximal runs of neighbouring segments that share group, step count and activity.
Padding inside a run is updated along: its gradients are zero and its values stay zero.
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
    """Elements [start, end) of a region that are updated together."""

    start: int
    end: int
    hyper: int
    step: int


@dataclass
class Region:
    """The part of one flat group that this rank updates.

    Attributes:
        label: unit and dtype, for messages.
        layout, start: the group's layout and the element at which this region begins.
        master: float32 or float64 parameters, or the int16 remainder of split ones; `param` the compute-dtype
            parameters to refresh, None where they are the master themselves, which may be in 16 bits then.
        state_dtype: of the update's state.
        grad: gives the reduced gradients; they may be at another place in each step.
        first_flag: position of the group's first parameter among all trainable parameters.
        hyper: optimizer group of each segment, -1 where the optimizer does not have the parameter.
        axes: mesh axes over which the group's layout is divided.
        counts: whether this rank enters sums over all ranks for it, so that each element counts once.
        divided: whether this region is one rank's part; else every rank updates the whole group.
        allocate: gives rows for the update's state where that does not rest on the device.
        off_device: which of 'master', 'param' and 'grad' rest off the device.
        row: where `master` rests that does not lie in place; `master` has its size and dtype then, and no elements.
        param_row: where `param` rests that does not lie in place, as `row` is for `master`; it is only written.
        window: host memory in which state that does not lie in place is updated, `window_numel` elements at a time;
            None where all of it does.
        whole_grad: gives the whole gradients of this rank alone, where the plan leaves them whole.
        blocks: how the plan keeps the moments in few bits; None where it does not.
        owners: rank along the axis that makes the update of each whole matrix; () where updates are element-wise.
    """

    label: str
    layout: FlatLayout
    start: int
    master: torch.Tensor
    param: torch.Tensor | None
    grad: Callable[[], torch.Tensor]
    first_flag: int
    hyper: Sequence[int]
    axes: Axes = DATA
    counts: bool = True
    divided: bool = False
    blocks: Blocks | None = None
    owners: Sequence[int] = ()
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
        """Zeros of `state_dtype` for each element of the region, where the update's state is to rest."""
        if self.allocate is not None:
            return self.allocate(self.master.numel(), self.state_dtype)
        return RowInPlace(torch.zeros_like(self.master, dtype=self.state_dtype))

    @property
    def rests(self) -> Row:
        """Where `master` rests."""
        return RowInPlace(self.master) if self.row is None else self.row

    @property
    def read_elsewhere(self) -> bool:
        """Whether gathers read, from where it rests, what an update of this region writes there."""
        return self.param_row is not None or (self.row is not None and self.param is None)

    @property
    def low(self) -> bool:
        """Whether 16-bit parameters are updated themselves, without master weights."""
        return self.master.dtype in (torch.bfloat16, torch.float16)

    def runs(self, active: Sequence[bool], steps: Sequence[int]) -> list[Run]:
        """The runs to update: `active` and `steps` (updates so far) are per segment of the group."""
        found: list[Run] = []
        previous = -2
        for index, low, high in self.pieces:
            hyper = self.hyper[index]
            if hyper < 0 or not active[index]:
                continue
            step = steps[index] + 1
            last = found[-1] if found else None
            if last is not None and index == previous + 1 and (last.hyper, last.step) == (hyper, step):
                found[-1] = Run(last.start, high, hyper, step)
            else:
                found.append(Run(low, high, hyper, step))
            previous = index
        return found

    def clear_padding(self) -> None:
        """Zero what of `param` belongs to no parameter, where all of it is to be written."""
        assert self.param is not None
        at = 0
        for _, low, high in (*self.pieces, (0, self.param.numel(), 0)):
            self.param[at:low].zero_()
            at = high

    def refresh_untouched(self, active: Sequence[bool]) -> None:
        """Write `param` from `master` where no update does: `param` may lie where the gradients were.

        Args:
            active: of all trainable parameters, whether each is updated.
        """
        for index, low, high in self.pieces:
            touched = active[self.first_flag + index] and self.hyper[index] >= 0
            if self.param is not None and not touched:
                self.param[low:high].copy_(self.master[low:high])
