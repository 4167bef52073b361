"""Hops: the steps of a quantized reduce (qgZ), first within each subgroup of ranks and then between subgroups.

    whole --encode--> all-to-all within --sum in float32--> a part --encode--> all-to-all between --sum--> shard

See Wang et al. 2023, arXiv:2306.10209, section 4.3. A ring can't add codes, so each rank receives the codes of its part
from all others and sums the decoded values. The rounding error of the last hop is kept and added to the next gradients
(error feedback), since with 4 bits alone the loss gets worse. Rejected: one hop over all ranks, in which each rank
sends all of its gradients out of its node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeroshard.errors import PlanError
from zeroshard.field_types import check_fields
from zeroshard.mesh import Axes
from zeroshard.plan.dtypes import itemsize
from zeroshard.plan.placement import Blocks

ERROR_DTYPE = "bfloat16"
"""Dtype of rounding errors; its own rounding is far below that of 4-bit codes."""
SUM_DTYPE = "float32"
_CODE_ALIGNMENT = 4


@dataclass(frozen=True)
class Feedback:
    """How the rounding error of a hop is fed back: error = beta * error + (1 - beta) * new error.

    The average over sums is that of LoCo (Xie et al. 2024, arXiv:2407.04480); a beta of 0 is plain error feedback.

    Attributes:
        reset: sums after which errors start from zero again; 0 is never.
    """

    beta: float = 0.0
    reset: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.beta < 1:
            raise PlanError(f"error feedback beta {self.beta}: a number from 0 to below 1 is needed")
        if self.reset < 0:
            raise PlanError(f"error feedback reset {self.reset}: a number of sums above 0 is needed, or 0 for never")


@dataclass(frozen=True)
class Hop:
    """One quantized sum over the ranks of some axes: its codes, and its error feedback."""

    axes: Axes
    blocks: Blocks
    feedback: Feedback | None = None

    def __post_init__(self) -> None:
        check_fields(self)


WITHIN, BETWEEN = Blocks(bits=8, size=256), Blocks(bits=4, size=128)


@dataclass(frozen=True)
class GradientCodes:
    """The options of quantized gradients in a recipe.

    Attributes:
        within: blocks of the hop within each subgroup, or of the only one.
        between: blocks of the hop between subgroups.
        feedback: of the last hop; None is none.
    """

    within: Blocks = WITHIN
    between: Blocks = BETWEEN
    feedback: Feedback | None = Feedback()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def block(self) -> int:
        """Elements that no rank's part may cut."""
        return math.lcm(self.within.size, self.between.size)


def hops_of(codes: GradientCodes, axes: Axes, within: Axes, *, one_each: bool) -> tuple[Hop, ...]:
    """The hops of gradients that are divided over `axes`.

    Args:
        within: the axes of the subgroups, the first ones of `axes`; () where all ranks are one group.
        one_each: every rank is a subgroup of its own, so that the only hop is between subgroups.
    """
    if within:
        return (Hop(within, codes.within), Hop(axes[len(within) :], codes.between, codes.feedback))
    return (Hop(axes, codes.between if one_each else codes.within, codes.feedback),)


@dataclass(frozen=True)
class HopSize:
    """The sizes of one hop on one rank.

    Attributes:
        numel: elements that are encoded.
        ranks: ranks that take part in the hop.
        record: bytes of the codes and scales for one of them.
    """

    numel: int
    ranks: int
    record: int

    @property
    def landed(self) -> int:
        """Elements of the sum that this rank keeps."""
        return self.numel // self.ranks

    @property
    def nbytes(self) -> int:
        """Payload: what a rank sends, its own part included."""
        return self.record * self.ranks


def hop_size(hop: Hop, numel: int, ranks: int) -> HopSize:
    """The sizes of a hop over so many ranks."""
    part = numel // ranks
    return HopSize(numel, ranks, hop.blocks.code_nbytes(part) + hop.blocks.scale_nbytes(part))


def exchange_nbytes(sizes: tuple[HopSize, ...]) -> tuple[int, int]:
    """Bytes for the codes of the larger hop, either way, and for the sum between two hops."""
    codes = max((size.nbytes for size in sizes), default=0)
    return codes, sum(size.landed for size in sizes[:-1]) * itemsize(SUM_DTYPE)


def block_problem(blocks: Blocks, numel: int) -> str | None:
    """Why a part of so many elements can't be written as codes; None where it can."""
    if numel % blocks.size:
        return f"blocks of {blocks.size} do not divide the {numel} elements of a rank's part"
    nbytes = blocks.code_nbytes(blocks.size)
    if nbytes % _CODE_ALIGNMENT:
        return f"blocks of {blocks.size} have codes of {nbytes} bytes; a multiple of 4 is needed"
    return None
