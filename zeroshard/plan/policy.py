"""The execution policy of a plan: how a step runs, apart from where state rests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeroshard.errors import PlanError
from zeroshard.field_types import check_fields
from zeroshard.fp8.recipe import Products
from zeroshard.nvme.places import Spill
from zeroshard.plan.dtypes import name_of


class OnNonFinite(str, Enum):
    """What a step does when the gradients hold an inf or NaN."""

    RAISE = "raise"
    SKIP = "skip"
    APPLY = "apply"
    """Apply the update, without clipping, since there is no norm. Only without a loss scale."""


class HostUpdate(str, Enum):
    """How optimizer state that rests off the device is updated."""

    PROCESSOR = "processor"
    """By the processor, during the next forward: gradients are downloaded, compute-dtype parameters uploaded."""
    STREAMED = "streamed"
    """By the device: state is uploaded piece by piece, updated by the device's kernel, and downloaded again."""


@dataclass(frozen=True)
class ExecutionPolicy:
    """How a step runs.

    Attributes:
        prefetch: how many units are gathered ahead of the one in use.
        reuse: keep the content of released slots while it is valid; False gathers before every use.
        spare_nbytes: extra device memory for slots that keep units gathered from forward to backward, last units first;
            with enough of it each unit is gathered once per micro-batch, as at stage 2.
        accumulate: several backwards per step are allowed, and gradients have an accumulator.
        micro_batches: how many micro-batches pass a unit before the next unit does (the vertical schedule); with 1
            each micro-batch passes all units by itself.
        overlap_step: gathers of parameters that rest whole overlap the next forward, and code that reads or writes the
            parameters before it must drain first; False lets the step wait for them. Sharded units are always
            prefetched.
        predivide: gradients are divided by this before they are summed over ranks.
        mean: gradients are averaged over data-parallel ranks (else summed).
        clip_norm: global gradient norm above which gradients are scaled down; 0 means no clipping.
        on_nonfinite: what to do about inf and NaN in the gradients.
        cast_inputs: floating inputs of the model are cast to this dtype; None leaves them.
        peer_copies: all-gathers and reduce-scatters are copies in memory that all ranks of an axis can access.
        parameter_sums: float64 values per trainable parameter that the optimizer sums over ranks in each step, in one
            all-reduce for all of them (Lamb: two squared norms).
        parameter_maxima: float64 values per trainable parameter whose maximum over ranks a compressed step takes, in
            one all-reduce (1-bit Lamb).
        stream_numel: elements of each device buffer for streamed state.
        pin_memory: pin host memory that is copied to and from the device.
        window_numel: elements of each window in host memory for state on disk.
        spill: the folders for state on disk; None if there is none, or if the engine is given the tier's memory.
        products: the layers that multiply in fp8; None if none does.
    """

    prefetch: int = 1
    reuse: bool = True
    spare_nbytes: int = 0
    accumulate: bool = False
    micro_batches: int = 1
    overlap_step: bool = False
    predivide: float = 1.0
    mean: bool = True
    clip_norm: float = 0.0
    on_nonfinite: OnNonFinite = OnNonFinite.RAISE
    cast_inputs: str | None = None
    peer_copies: bool = False
    parameter_sums: int = 0
    parameter_maxima: int = 0
    stream_numel: int = 0
    pin_memory: bool = True
    window_numel: int = 0
    spill: Spill | None = None
    products: Products | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "cast_inputs", name_of(self.cast_inputs))
        check_fields(self)
        if self.prefetch < 0:
            raise PlanError(f"policy.prefetch must not be negative, is {self.prefetch}")
        if self.clip_norm < 0:
            raise PlanError(f"clip_norm {self.clip_norm} must be a number above 0, or 0 for no clipping")
        for name in ("parameter_sums", "parameter_maxima", "stream_numel", "window_numel"):
            if getattr(self, name) < 0:
                raise PlanError(f"policy.{name} must not be negative, is {getattr(self, name)}")
        if self.spare_nbytes < 0 or (self.spare_nbytes and not self.reuse):
            raise PlanError(f"spare_nbytes {self.spare_nbytes} must be 0 or more, and needs reuse of what is in slots")
        if self.micro_batches < 1:
            raise PlanError(f"micro_batches {self.micro_batches!r} must be a whole number of at least 1")
        if self.micro_batches > 1 and self.accumulate:
            raise PlanError(
                f"micro_batches {self.micro_batches} with accumulate: all micro-batches of a step pass a unit in turn, "
                "and their gradients are summed before the only reduce; leave accumulate out"
            )
        if self.predivide <= 0:
            raise PlanError(f"predivide {self.predivide} must be a finite number above 0")
