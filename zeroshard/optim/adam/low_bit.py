"""Adam and AdamW with moments in 8 or 4 bits: half to a sixth of the memory of float32 moments and master weights.

    for one part of a region after the other     codes -> float32 moments -> Adam, in float32 -> codes
                                                                          -> master weights, parameters

The update uses the moments before they are rounded, as torchao's optimizers do. Parameters with fewer than 4096
elements, or a number of elements that is no multiple of the block size, keep moments in float32; the plan puts the two
kinds into separate flat groups. How a parameter's moments are kept depends on the parameter alone, so results are
equal, bit for bit, at any number of ranks and at every stage. Off the device codes and scales pass it in pieces
(`passing`), from disk through windows of host memory.

Rejected: to quantize the blocks that lie within one rank's shard and keep the rest in float32. Values would then depend
on the number of ranks, and a checkpoint could not be loaded exactly at another number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.adam.blocks import BlockedState, require_torchao
from zeroshard.optim.adam.passing import Passage, StateRow
from zeroshard.optim.parts import HostParts, PiecewiseParts, part_of
from zeroshard.optim.regions import Region
from zeroshard.optim.rules import ADAM, ADAMW, Rule
from zeroshard.optim.saved_state import STEP, SavedState, Scalar, StatePart, piece_of
from zeroshard.optim.sources import ParamGroups, Source, fill_group
from zeroshard.optim.update_context import UpdateContext
from zeroshard.optim.updates import FlatUpdate, PiecewiseUpdate, UpdateMethod, refuse_unsupported, scaled
from zeroshard.optim.windows import Windows
from zeroshard.plan.placement import Blocks
from zeroshard.tiers import RowInPlace, RowPart, values_of

BLOCK_SIZES: Mapping[int, int] = {8: 256, 4: 128}
"""Elements of a block by the number of bits, as torchao has them."""


@dataclass(frozen=True)
class Kind:
    """A rule, the bits of its moments, and torchao's default decay."""

    rule: Rule
    bits: int
    decay: float


KINDS: Mapping[str, Kind] = {
    "Adam8bit": Kind(ADAM, 8, 0.0),
    "AdamW8bit": Kind(ADAMW, 8, 1e-2),
    "Adam4bit": Kind(ADAM, 4, 0.0),
    "AdamW4bit": Kind(ADAMW, 4, 1e-2),
}
"""The names are torchao's, and Adam's decay is coupled, as there."""
_PART_NUMEL = 1 << 22
_SIGNED = (True, False)


def low_bit_source(
    name: str,
    groups: ParamGroups,
    hyper: Mapping[str, Any],
    block_size: int | None = None,
    client: torch.optim.Optimizer | None = None,
) -> Source:
    """A source over `groups`.

    Args:
        name: one of KINDS.
        block_size: elements that share a scale; None for torchao's number.

    Raises:
        PlanError: torchao is missing, or a hyper-parameter is out of range.
    """
    rule, bits, decay = KINDS[name].rule, KINDS[name].bits, KINDS[name].decay
    require_torchao(bits, name)
    blocks = Blocks(bits, BLOCK_SIZES[bits] if block_size is None else block_size)
    defaults = {**rule.defaults, "weight_decay": decay, **hyper}
    for group in groups:
        fill_group(group, defaults)
        if isinstance(group["lr"], torch.Tensor):  # torchao's optimizers make it one
            group["lr"] = float(group["lr"])
        rule.check(group)
        if group.get("amsgrad"):
            raise PlanError(f"{name} does not support amsgrad here: set it to False")
    return Source(
        name,
        groups,
        defaults,
        len(rule.state),
        lambda context: _update(context, name, rule, blocks, groups),
        passing=lambda context, buffers, numel: _passing(
            context, Passage(context.device, buffers, numel), name, rule, blocks, groups
        ),
        blocks=blocks,
        client=client,
    )


def _passing(
    context: UpdateContext, passage: Passage, name: str, rule: Rule, blocks: Blocks, groups: ParamGroups
) -> PiecewiseUpdate:
    """The same updates for regions of which some have their state off the device."""
    blocked, plain = _divided(context, name, blocks)
    return PiecewiseParts(
        [
            part_of(
                "blocked", context, blocked, lambda part: BlockedUpdate(name, rule, part.regions, part.device, passage)
            ),
            part_of("plain", context, plain, lambda part: PassingFlatUpdate(rule, part.regions, groups, passage)),
        ],
        context.regions,
    )


def _update(context: UpdateContext, name: str, rule: Rule, blocks: Blocks, groups: ParamGroups) -> UpdateMethod:
    """One update for regions with moments in blocks, and one for regions with moments in float32."""
    blocked, plain = _divided(context, name, blocks)
    return HostParts(
        [
            part_of("blocked", context, blocked, lambda part: BlockedUpdate(name, rule, part.regions, part.device)),
            part_of("plain", context, plain, lambda part: FlatUpdate(rule, part.regions, groups)),
        ]
    )


def _divided(context: UpdateContext, name: str, blocks: Blocks) -> tuple[list[int], list[int]]:
    """The numbers of regions with moments in blocks, and of those with moments in float32."""
    blocked: list[int] = []
    plain: list[int] = []
    for number, region in enumerate(context.regions):
        _check_region(region, name, blocks)
        (blocked if region.blocks is not None else plain).append(number)
    return blocked, plain


def _check_region(region: Region, name: str, blocks: Blocks) -> None:
    if region.blocks not in (None, blocks):
        raise PlanError(
            f"the plan keeps moments of {region.label} in {region.blocks}, but {name} has {blocks}; let zeroshard make "
            "the plan, or write these blocks into the recipe"
        )
    suiting = [segment.name for segment in region.layout.segments if blocks.suit(segment.numel)]
    if region.blocks is None and suiting:
        raise PlanError(
            f"the plan keeps moments of {suiting[0]!r} in float32, but {name} has them in {blocks.bits} bits: write "
            f"Recipe(blocks=Blocks({blocks.bits}, {blocks.size})), or let zeroshard make the plan"
        )


class PassingFlatUpdate(FlatUpdate):
    """A FlatUpdate whose regions with state off the device pass it."""

    def __init__(self, rule: Rule, regions: Sequence[Region], groups: ParamGroups, passage: Passage) -> None:
        super().__init__(rule, regions, groups)
        self._passage = passage

    def apply_region(
        self, number: int, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]
    ) -> None:
        """See PiecewiseUpdate."""
        region, steps = self.regions[number], self._steps[number]
        if region.allocate is None:
            super().apply_region(number, coefficient, active, hyper)
            return
        on = active[region.first_flag : region.first_flag + len(steps)]

        def update(piece: Region, state: Sequence[torch.Tensor]) -> None:
            for run in piece.runs(on, steps):
                self._update_run(piece, state, run, hyper[run.group], coefficient)

        self._passage.in_memory.through(region, [StateRow(row) for row in self._state[number]], update)
        _count(steps, region, on)


class BlockedUpdate(SavedState):
    """A rule with two moments on regions whose moments are kept in blocks.

    Args:
        name: the optimizer, for messages.
        device: where updates run.
        passage: for regions whose state rests off the device; None if there are none.
    """

    def __init__(
        self,
        name: str,
        rule: Rule,
        regions: Sequence[Region],
        device: torch.device,
        passage: Passage | None = None,
    ) -> None:
        self._name, self._rule, self.regions, self._passage = name, rule, regions, passage
        self._state = [[_new_state(region, signed, name, device) for signed in _SIGNED] for region in regions]
        self._rows = [
            [
                one
                for kind in state
                for one in (StateRow(kind.codes, kind.per_code), StateRow(kind.scale, _size(region)))
            ]
            for region, state in zip(regions, self._state, strict=True)
        ]
        per = [[one.per for one in rows] for rows in self._rows]
        self._windows = Windows(regions, [[one.row for one in rows] for rows in self._rows], per)
        self._steps = [[0] * len(region.layout.segments) for region in regions]

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        """See UpdateMethod."""
        self.check(hyper)
        self.begin(range(len(self.regions)))
        for number in range(len(self.regions)):
            self.apply_region(number, coefficient, active, hyper)

    def check(self, hyper: Sequence[Mapping[str, Any]]) -> None:
        """See PiecewiseUpdate."""
        refuse_unsupported(self._name, hyper)

    def begin(self, numbers: Sequence[int]) -> None:
        """See PiecewiseUpdate."""
        self._windows.begin(numbers)

    def apply_region(
        self, number: int, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]
    ) -> None:
        """See PiecewiseUpdate."""
        region, rows, steps = self.regions[number], self._rows[number], self._steps[number]
        on = active[region.first_flag : region.first_flag + len(steps)]

        def update(piece: Region, state: Sequence[torch.Tensor]) -> None:
            for run in piece.runs(on, steps):
                for low, high in _block_ranges(piece, run.start, run.end):
                    self._update_part(number, piece, state, slice(low, high), hyper[run.group], run.step, coefficient)

        if region.allocate is None:
            update(region, [values_of(one.row) for one in rows])
        elif self._passage is not None and region.window is None:
            self._passage.in_memory.through(region, rows, update)
        elif self._passage is not None:
            for opened, state in self._windows.open(number):
                held = [StateRow(RowInPlace(values), one.per) for values, one in zip(state, rows, strict=True)]
                self._passage.in_windows.through(opened, held, update)
        _count(steps, region, on)

    def _update_part(
        self,
        number: int,
        piece: Region,
        state: Sequence[torch.Tensor],
        cut: slice,
        hyper: Mapping[str, Any],
        step: int,
        coefficient: float,
    ) -> None:
        """Update whole blocks of elements that have the same hyper-parameters and step, all of it on the device."""
        grad = scaled(piece.grad()[cut], coefficient)
        kinds, rows = self._state[number], self._rows[number]
        parts = [values[cut.start // one.per : cut.stop // one.per] for values, one in zip(state, rows, strict=True)]
        pairs = list(zip(parts[::2], parts[1::2], strict=True))
        moments = [kind.decode(codes, scale) for kind, (codes, scale) in zip(kinds, pairs, strict=True)]
        self._rule.update(piece.master[cut], grad, moments, hyper, step)
        for kind, values, (codes, scale) in zip(kinds, moments, pairs, strict=True):
            kind.encode(values, codes, scale)
        if piece.param is not None:
            piece.param[cut].copy_(piece.master[cut])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Codes and scales that are in memory, by region."""
        return {
            f"{number}.{name}_{part}": row.values
            for number, state in enumerate(self._state)
            for name, kind in zip(self._rule.state, state, strict=True)
            for part, row in (("codes", kind.codes), ("scale", kind.scale))
            if row.values is not None
        }

    def state_keys(self, region: int) -> tuple[str, ...]:
        """See SavedState."""
        return tuple(f"{name}_{part}" for name in self._rule.state for part in ("codes", "scale"))

    def value_keys(self, region: int) -> tuple[str, ...]:
        """See SavedState."""
        return self._rule.state

    def elements_per_value(self, region: int, key: str) -> int:
        """See SavedState."""
        return next(one.per for one in self._rows[region][0 if key.endswith("_codes") else 1 :])

    def state_parts(self) -> Iterator[StatePart]:
        """See SavedState."""
        for number, (region, state) in enumerate(zip(self.regions, self._state, strict=True)):
            for index, low, high in region.pieces:
                if region.groups[index] >= 0:
                    packed = {name: kind.packed(low, high) for name, kind in zip(self._rule.state, state, strict=True)}
                    scalars = {STEP: torch.tensor(float(self._steps[number][index]))}
                    yield StatePart(number, index, low, high, {}, scalars, packed)

    def reset_state(self) -> None:
        """See SavedState."""
        for state, steps in zip(self._state, self._steps, strict=True):
            for kind in state:
                kind.zero()
            steps[:] = [0] * len(steps)

    def open_part(
        self, region: int, index: int, dtypes: Mapping[str, torch.dtype], scalars: Mapping[str, Scalar]
    ) -> dict[str, RowPart]:
        """See SavedState."""
        self._steps[region][index] = int(scalars[STEP]) if STEP in scalars else 0
        cut = piece_of(self.regions[region], index)
        return {
            f"{name}_{part}": stored.values
            for name, kind in zip(self._rule.state, self._state[region], strict=True)
            for part, stored in kind.packed(cut.start, cut.stop).stored.items()
        }


def _new_state(region: Region, signed: bool, name: str, device: torch.device) -> BlockedState:
    assert region.blocks is not None
    numel = region.master.numel()
    return BlockedState(numel, region.blocks, signed=signed, device=device, what=name, allocate=region.allocate)


def _size(region: Region) -> int:
    assert region.blocks is not None
    return region.blocks.size


def _count(steps: list[int], region: Region, on: Sequence[bool]) -> None:
    """A region was updated: count it for each of its parameters that were."""
    for index, was_active in enumerate(on):
        steps[index] += was_active and region.groups[index] >= 0


def _block_ranges(region: Region, start: int, end: int) -> Iterator[tuple[int, int]]:
    """[start, end) in parts of whole blocks, so that the float32 memory of a step is bounded."""
    assert region.blocks is not None
    step = max(1, _PART_NUMEL // region.blocks.size) * region.blocks.size
    for low in range(start, end, step):
        yield low, min(low + step, end)
