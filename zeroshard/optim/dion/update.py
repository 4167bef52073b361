"""Dion on sharded state: the update of a matrix is a product of two orthonormal factors, found by one power iteration.

    B    = M + gradient            momentum, with what the updates so far have left of it
    P    = orthonormal(B Q)        left factor (rows x rank)
    R    = B' P                    next right factor (columns x rank)
    M    = B - (1 - mu) P R'       error feedback: what P R' misses of B stays in the momentum as it is
    Q    = R with columns of norm 1
    X    = (1 - lr decay) X - lr sqrt(rows / columns) P Q'

B, M and X are never put together: each rank multiplies its rows (`blocks`), and only P, R and Q are summed over the
ranks (`pipeline`). Products and sums are float64, so that momentum in float32 does not depend on how many ranks share
it, but for the last digit. Parameters of other groups are updated by AdamW.

A direction along which B is smaller than `LEAST` of its largest is left out of the update, and keeps its column of Q:
there B is but rounding, which an orthonormal P would make as large as the rest. Columns of zeros in a stored Q stand
for their first ones (`first_factor`), so that state is zeros before the first step, as that of all updates. Q is stored
in the first columns x rank elements of a row of state with one element for each of the parameter, by rank first: a
checkpoint with another rank of the factors gives the first columns.

Ahn, Xu, Abreu, Langford 2025 (arXiv:2504.05295), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.mesh import Axes
from zeroshard.optim.dion.blocks import Block, blocks_of
from zeroshard.optim.dion.orthonormal import LEAST, first_factor, orthonormalize
from zeroshard.optim.dion.pipeline import FactorBuffers, FactorPipeline, Place
from zeroshard.optim.regions import Region
from zeroshard.optim.saved_state import FlatState
from zeroshard.optim.segments import Flags, Piece, pieces_of
from zeroshard.optim.update_context import UpdateContext
from zeroshard.plan.factors import Factors, factors_of
from zeroshard.tiers import Row, RowInPlace


class DionUpdate(FlatState):
    """The update of this rank's regions of matrices. Regions must number their flags from 0."""

    def __init__(self, context: UpdateContext) -> None:
        self.regions = context.regions
        self._device = context.device
        self._flags = Flags(context.regions, context.device)
        self._momentum = [torch.zeros_like(each.master, dtype=each.state_dtype) for each in context.regions]
        self._right = [torch.zeros_like(each.master, dtype=each.state_dtype) for each in context.regions]
        self._pieces = {
            (number, piece.index): piece for number, region in enumerate(self.regions) for piece in pieces_of(region)
        }
        self._sizes: dict[Place, Factors] = {}
        divided: dict[Axes, list[tuple[Place, Factors]]] = {}
        for number, region in enumerate(context.regions):
            members = list(_sizes_of(number, region))
            self._sizes.update(members)
            if region.divided and members:
                divided.setdefault(region.axes, []).extend(members)
        pipelines = {
            axes: FactorPipeline(members, self, context.axes[axes], context.device) for axes, members in divided.items()
        }
        self._pipelines = list(pipelines.values())
        self._pipeline_of = {number: pipelines[axes] for axes, members in divided.items() for (number, _), _ in members}
        self._blocks = {place: self._blocks_of(place) for place in self._pieces}
        self._groups: Sequence[Mapping[str, Any]] = ()
        self._coefficient = torch.zeros((), dtype=torch.float64, device=context.device)
        self._on = self._flags.owned

    def _blocks_of(self, place: Place) -> list[Block]:
        low = self._offset(place)
        cut = self._pieces[place].cut
        return blocks_of(low, low + cut.stop - cut.start, self._sizes[place])

    def _offset(self, place: Place) -> int:
        """The element of a parameter at which this rank's piece begins."""
        region = self.regions[place[0]]
        return region.start + self._pieces[place].cut.start - region.layout.segments[place[1]].offset

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the pipelines' buffers during a step."""
        return sum(pipeline.buffer_nbytes for pipeline in self._pipelines)

    def prepare(self, coefficient: torch.Tensor, active: torch.Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        """See DeviceUpdate. The sums of divided matrices' factors begin here."""
        self._groups, self._coefficient = groups, coefficient
        self._on = active & self._flags.owned
        for pipeline in self._pipelines:
            pipeline.begin()

    def apply(self, number: int) -> None:
        """See DeviceUpdate."""
        pipeline = self._pipeline_of.get(number)
        if pipeline is not None:
            pipeline.finish(number)
            return
        for piece in pieces_of(self.regions[number]):
            place = number, piece.index
            factors = _buffers(self._sizes[place], self._device)
            for step in (self.start, self.project, self.correct, self.finish):
                step(place, factors)

    def start(self, place: Place, factors: FactorBuffers) -> None:
        """See FactorWork."""
        piece = self._pieces.get(place)
        if piece is None:
            return
        momentum = self._momentum[place[0]][piece.cut]
        grad = self.regions[place[0]].grad()[piece.cut].float() * self._coefficient
        momentum.copy_(torch.where(self._on[piece.flag], momentum + grad, momentum))
        held, low = self._held_right(place, factors)
        factors.right.view(-1)[low : low + held.numel()] = held

    def project(self, place: Place, factors: FactorBuffers) -> None:
        """See FactorWork."""
        right, sizes = factors.right, self._sizes[place]
        if not right.numel():
            return
        unset = torch.linalg.vector_norm(right, dim=-1, keepdim=True) == 0
        right.copy_(torch.where(unset, first_factor(sizes.rank, sizes.batch, sizes.columns, right.device), right))
        for block, rows in self._rows(place):
            product = rows @ right[:, block.matrices].permute(1, 2, 0).double()
            factors.left[block.matrices, block.rows] += product

    def correct(self, place: Place, factors: FactorBuffers) -> None:
        """See FactorWork."""
        if factors.left.numel():
            factors.left.copy_(orthonormalize(factors.left))
        for block, rows in self._rows(place):
            product = rows.mT @ factors.left[block.matrices, block.rows]
            factors.following[:, block.matrices] += product.permute(2, 0, 1)

    def finish(self, place: Place, factors: FactorBuffers) -> None:
        """See FactorWork."""
        piece = self._pieces.get(place)
        if piece is None:
            return
        following = factors.following
        norms = torch.linalg.vector_norm(following, dim=-1, keepdim=True)
        kept = norms > LEAST * norms.amax(dim=0, keepdim=True)
        right = torch.where(kept, following / norms, factors.right.double())
        self._update(place, piece, factors.left.mul_(kept.permute(1, 2, 0)), following, right)
        held, low = self._held_right(place, factors)
        held.copy_(torch.where(self._on[piece.flag], right.reshape(-1)[low : low + held.numel()].to(held.dtype), held))

    def _update(
        self, place: Place, piece: Piece, left: torch.Tensor, following: torch.Tensor, right: torch.Tensor
    ) -> None:
        """Update the momentum and the values of a piece."""
        region, hyper, on = self.regions[place[0]], self._groups[piece.group], self._on[piece.flag]
        rate, sizes = float(hyper["lr"]), self._sizes[place]
        scale = rate * math.sqrt(sizes.rows / sizes.columns)
        momentum, values = self._momentum[place[0]][piece.cut], region.master[piece.cut]
        for block in self._blocks[place]:
            rows, cut = left[block.matrices, block.rows], slice(block.low, block.high)
            for target, factor, by, times in (
                (momentum, following, 1.0, hyper["mu"] - 1.0),
                (values, right, 1.0 - rate * hyper["weight_decay"], -scale),
            ):
                product = block.own(rows @ factor[:, block.matrices].permute(1, 0, 2))
                held = target[cut]
                changed = (held.double() * by).add_(product, alpha=times).to(held.dtype)
                held.copy_(torch.where(on, changed, held))
        if region.param is not None:
            region.param[piece.cut].copy_(values)

    def _rows(self, place: Place) -> Iterator[tuple[Block, torch.Tensor]]:
        """This rank's rows of a matrix' momentum, with the gradient added."""
        piece = self._pieces.get(place)
        if piece is not None:
            momentum = self._momentum[place[0]][piece.cut]
            for block in self._blocks[place]:
                yield block, block.padded(momentum)

    def _held_right(self, place: Place, factors: FactorBuffers) -> tuple[torch.Tensor, int]:
        """The elements of the right factor that this rank's state has, and the place of the first of them in it."""
        cut, low = self._pieces[place].cut, self._offset(place)
        count = max(0, min(factors.right.numel() - low, cut.stop - cut.start))
        return self._right[place[0]][cut.start : cut.start + count], low

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


def _sizes_of(number: int, region: Region) -> list[tuple[Place, Factors]]:
    segments = region.layout.segments
    if len(region.factor_ranks) != len(segments):
        raise PlanError(
            f"the plan names no ranks of factors for the matrices of {region.label}, from which Dion updates them; "
            "name them in Recipe(factor_ranks=...), or let zeroshard make the plan"
        )
    return [
        ((number, index), factors_of(segment.shape, rank))
        for index, (segment, rank) in enumerate(zip(segments, region.factor_ranks, strict=True))
    ]


def _buffers(sizes: Factors, device: torch.device) -> FactorBuffers:
    right = torch.zeros(sizes.rank, sizes.batch, sizes.columns, device=device)
    left = torch.zeros(sizes.batch, sizes.rows, sizes.rank, dtype=torch.float64, device=device)
    return FactorBuffers(right, left, torch.zeros_like(right, dtype=torch.float64))
