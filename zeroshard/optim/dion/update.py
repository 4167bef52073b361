"""Dion on sharded state: the update of a matrix is a product of two orthonormal factors, found by one power iteration.

    B    = M + gradient            momentum, with what the updates so far have left of it
    P    = orthonormal(B Q)        left factor (rows x rank)
    R    = B' P                    next right factor (columns x rank)
    M    = B - (1 - mu) P R'       error feedback: what P R' misses of B stays in the momentum as it is
    Q    = R with columns of norm 1
    X    = (1 - lr decay) X - lr sqrt(rows / columns) P Q'

B, M and X are never put together: each rank multiplies its rows (`blocks`), and only P, R and Q are summed over the
ranks, of matrices that lie on several (`pipeline`). A rank updates matrices that it has alone when the turn of their
region comes. Products and sums are float64, so that momentum in float32 does not depend on how many ranks share it, but
for the last digit. Parameters of other groups are updated by AdamW.

A direction along which B is smaller than `LEAST` of its largest is left out of the update, and keeps its column of Q:
there B is but rounding, which an orthonormal P would make as large as the rest. Columns of zeros in a stored Q stand
for their first ones (`first_factor`), so that state is zeros before the first step, as that of all updates. Q is stored
in the first rank x columns elements of the matrix' place in a row of state with one element for each of the parameter:
with the matrix, so that it is divided as this is, and column by column, so that a checkpoint with another rank of the
factors gives the first columns.

Ahn, Xu, Abreu, Langford 2025 (arXiv:2504.05295), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.mesh import Axes
from zeroshard.optim.dion.blocks import Block, blocks_of, stacks_of
from zeroshard.optim.dion.orthonormal import LEAST, first_factor, orthonormalize
from zeroshard.optim.dion.pipeline import FactorBuffers, FactorPipeline, Place
from zeroshard.optim.regions import Region
from zeroshard.optim.saved_state import FlatState
from zeroshard.optim.segments import Flags, Piece, pieces_of
from zeroshard.optim.update_context import UpdateContext
from zeroshard.plan.factors import Factors, factors_of, spread_matrices
from zeroshard.tiers import Row, RowInPlace


@dataclass(frozen=True)
class _Stack:
    """Matrices of a parameter that are updated together, and what this rank has of them.

    Attributes:
        sizes: of their factors.
        piece: this rank's piece of the parameter.
        cut: this rank's elements of the matrices, in the region.
        low: the first of these, counted from the first element of the matrices.
        blocks: the rows that this rank has a part of.
    """

    sizes: Factors
    piece: Piece
    cut: slice
    low: int
    blocks: Sequence[Block]


class DionUpdate(FlatState):
    """The update of this rank's regions of matrices. Regions must number their flags from 0."""

    def __init__(self, context: UpdateContext) -> None:
        self.regions = context.regions
        self._device = context.device
        self._flags = Flags(context.regions, context.device)
        self._momentum = [torch.zeros_like(each.master, dtype=each.state_dtype) for each in context.regions]
        self._right = [torch.zeros_like(each.master, dtype=each.state_dtype) for each in context.regions]
        self._stacks: dict[Place, _Stack] = {}
        self._alone: list[list[Place]] = []
        spread: dict[Axes, list[tuple[Place, Factors]]] = {}
        for number, region in enumerate(context.regions):
            _check_ranks(region)
            members = spread_matrices(region.layout, region.factor_ranks) if region.divided else []
            spread.setdefault(region.axes, []).extend(((number, index, at), sizes) for index, at, sizes in members)
            self._find_stacks(number, region, {(index, at): sizes for index, at, sizes in members})
        pipelines = {
            axes: FactorPipeline(members, self, context.axes[axes], context.device)
            for axes, members in spread.items()
            if members
        }
        self._pipelines = list(pipelines.values())
        self._pipeline_of = {number: pipelines[axes] for axes, members in spread.items() for (number, *_), _ in members}
        self._groups: Sequence[Mapping[str, Any]] = ()
        self._coefficient = torch.zeros((), dtype=torch.float64, device=context.device)
        self._on = self._flags.owned

    def _find_stacks(self, number: int, region: Region, spread: Mapping[tuple[int, int], Factors]) -> None:
        """Note what this rank has of the matrices of a region: those that it has alone, and parts of `spread` ones."""
        alone: list[Place] = []
        for piece in pieces_of(region):
            segment = region.layout.segments[piece.index]
            low = region.start + piece.cut.start - segment.offset
            high = low + piece.cut.stop - piece.cut.start
            whole = factors_of(segment.shape, region.factor_ranks[piece.index])
            found = {first: replace(whole, batch=last - first) for first, last in stacks_of(low, high, whole)}
            alone += [(number, piece.index, first) for first in found]
            found |= {matrix: sizes for (index, matrix), sizes in spread.items() if index == piece.index}
            for first, sizes in found.items():
                start = first * sizes.numel
                begin, end = max(low, start), min(high, start + sizes.batch * sizes.numel)
                if begin < end:
                    cut = slice(piece.cut.start + begin - low, piece.cut.start + end - low)
                    blocks = blocks_of(begin - start, end - start, sizes)
                    self._stacks[number, piece.index, first] = _Stack(sizes, piece, cut, begin - start, blocks)
        self._alone.append(alone)

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the pipelines' buffers during a step."""
        return sum(pipeline.buffer_nbytes for pipeline in self._pipelines)

    def prepare(self, coefficient: torch.Tensor, active: torch.Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        """See DeviceUpdate. The sums of factors begin here."""
        self._groups, self._coefficient = groups, coefficient
        self._on = active & self._flags.owned
        for pipeline in self._pipelines:
            pipeline.begin()

    def apply(self, number: int) -> None:
        """See DeviceUpdate."""
        pipeline = self._pipeline_of.get(number)
        if pipeline is not None:
            pipeline.finish(number)
        for place in self._alone[number]:
            factors = _buffers(self._stacks[place].sizes, self._device)
            for step in (self.start, self.project, self.correct, self.finish):
                step(place, factors)
        region = self.regions[number]
        for piece in pieces_of(region) if region.param is not None else ():
            assert region.param is not None
            region.param[piece.cut].copy_(region.master[piece.cut])

    def start(self, place: Place, factors: FactorBuffers) -> None:
        """See FactorWork."""
        stack = self._stacks.get(place)
        if stack is None:
            return
        momentum = self._momentum[place[0]][stack.cut]
        grad = self.regions[place[0]].grad()[stack.cut].float() * self._coefficient
        momentum.copy_(torch.where(self._on[stack.piece.flag], momentum + grad, momentum))
        self._own_right(place, factors.right).copy_(self._held_right(place))

    def project(self, place: Place, factors: FactorBuffers) -> None:
        """See FactorWork."""
        right = factors.right
        _, rank, columns = right.shape
        unset = torch.linalg.vector_norm(right, dim=-1, keepdim=True) == 0
        right.copy_(torch.where(unset, first_factor(rank, columns, right.device), right))
        for block, rows in self._rows(place):
            factors.left[block.matrices, block.rows] += rows @ right[block.matrices].mT.double()

    def correct(self, place: Place, factors: FactorBuffers) -> None:
        """See FactorWork."""
        factors.left.copy_(orthonormalize(factors.left))
        for block, rows in self._rows(place):
            factors.following[block.matrices] += factors.left[block.matrices, block.rows].mT @ rows

    def finish(self, place: Place, factors: FactorBuffers) -> None:
        """See FactorWork."""
        stack = self._stacks.get(place)
        if stack is None:
            return
        norms = torch.linalg.vector_norm(factors.following, dim=-1, keepdim=True)
        kept = norms > LEAST * norms.amax(dim=1, keepdim=True)
        right = torch.where(kept, factors.following / norms, factors.right.double())
        self._update(place, stack, factors.left.mul_(kept.mT), factors.following, right)
        held = self._held_right(place)
        held.copy_(torch.where(self._on[stack.piece.flag], self._own_right(place, right).to(held.dtype), held))

    def _update(
        self, place: Place, stack: _Stack, left: torch.Tensor, following: torch.Tensor, right: torch.Tensor
    ) -> None:
        """Update the momentum and the values of matrices."""
        region, hyper, on = self.regions[place[0]], self._groups[stack.piece.group], self._on[stack.piece.flag]
        rate = float(hyper["lr"])
        scale = rate * math.sqrt(stack.sizes.rows / stack.sizes.columns)
        momentum, values = self._momentum[place[0]][stack.cut], region.master[stack.cut]
        for block in stack.blocks:
            rows, cut = left[block.matrices, block.rows], slice(block.low, block.high)
            for target, factor, by, times in (
                (momentum, following, 1.0, hyper["mu"] - 1.0),
                (values, right, 1.0 - rate * hyper["weight_decay"], -scale),
            ):
                held = target[cut]
                product = block.own(rows @ factor[block.matrices])
                changed = (held.double() * by).add_(product, alpha=times).to(held.dtype)
                held.copy_(torch.where(on, changed, held))

    def _rows(self, place: Place) -> Iterator[tuple[Block, torch.Tensor]]:
        """This rank's rows of the matrices' momentum, with the gradient added."""
        stack = self._stacks.get(place)
        if stack is not None:
            momentum = self._momentum[place[0]][stack.cut]
            for block in stack.blocks:
                yield block, block.padded(momentum)

    def _held_right(self, place: Place) -> torch.Tensor:
        """What this rank's state has of right factors: (matrices, elements)."""
        stack = self._stacks[place]
        state, most = self._right[place[0]][stack.cut], stack.sizes.rank * stack.sizes.columns
        if stack.sizes.batch == 1:
            return state[: max(0, most - stack.low)][None]
        return state.view(stack.sizes.batch, stack.sizes.numel)[:, :most]

    def _own_right(self, place: Place, right: torch.Tensor) -> torch.Tensor:
        """The elements of right factors of which this rank has the state, in the same shape."""
        stack = self._stacks[place]
        return right.view(len(right), -1)[:, stack.low : stack.low + stack.cut.stop - stack.cut.start]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Momentum and right factors by region."""
        return {
            f"{number}.{name}": tensor
            for number, pair in enumerate(zip(self._momentum, self._right, strict=True))
            for name, tensor in zip(("momentum_buffer", "right_factor"), pair, strict=True)
        }

    def flat_states(self) -> list[tuple[Region, dict[str, Row]]]:
        """See FlatState."""
        return [
            (region, {"momentum_buffer": RowInPlace(momentum), "right_factor": RowInPlace(right)})
            for region, momentum, right in zip(self.regions, self._momentum, self._right, strict=True)
        ]

    def step_counts(self) -> None:
        """See FlatState: steps are not counted, since no update depends on their number."""
        return

    def set_step(self, region: int, index: int, count: float) -> None:
        """See FlatState."""


def _check_ranks(region: Region) -> None:
    if len(region.factor_ranks) != len(region.layout.segments):
        raise PlanError(
            f"the plan names no ranks of factors for the matrices of {region.label}, from which Dion updates them; "
            "name them in Recipe(factor_ranks=...), or let zeroshard make the plan"
        )


def _buffers(sizes: Factors, device: torch.device) -> FactorBuffers:
    right = torch.zeros(sizes.batch, sizes.rank, sizes.columns, device=device)
    left = torch.zeros(sizes.batch, sizes.rows, sizes.rank, dtype=torch.float64, device=device)
    return FactorBuffers(right, left, torch.zeros_like(right, dtype=torch.float64))
