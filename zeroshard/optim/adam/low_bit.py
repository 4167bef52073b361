"""Adam and AdamW with moments in 8 or 4 bits: half to a sixth of the memory of float32 moments and master weights.

    for one part of a region after the other     codes -> float32 moments -> Adam, in float32 -> codes
                                                                          -> master weights, parameters

The update uses the moments before they are rounded, as torchao's optimizers do. Parameters with fewer than 4096
elements, or a number of elements that is no multiple of the block size, keep moments in float32; the plan puts the two
kinds into separate flat groups. How a parameter's moments are kept depends on the parameter alone, so results are
equal, bit for bit, at any number of ranks and at every stage.

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
from zeroshard.optim.parts import HostParts, part_of
from zeroshard.optim.regions import Region
from zeroshard.optim.rules import ADAM, ADAMW, Rule
from zeroshard.optim.saved_state import STEP, SavedState, Scalar, StatePart, piece_of
from zeroshard.optim.sources import ParamGroups, Source, fill_group
from zeroshard.optim.update_context import UpdateContext
from zeroshard.optim.updates import FlatUpdate, UpdateMethod, refuse_unsupported, scaled
from zeroshard.plan.placement import Blocks
from zeroshard.tiers import RowPart

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
_PART_NUMEL = 1 << 21
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
        blocks=blocks,
        client=client,
    )


def _update(context: UpdateContext, name: str, rule: Rule, blocks: Blocks, groups: ParamGroups) -> UpdateMethod:
    """One update for regions with moments in blocks, and one for regions with moments in float32."""
    blocked: list[int] = []
    plain: list[int] = []
    for number, region in enumerate(context.regions):
        _check_region(region, name, blocks)
        (blocked if region.blocks is not None else plain).append(number)
    return HostParts(
        [
            part_of("blocked", context, blocked, lambda part: BlockedUpdate(name, rule, part.regions)),
            part_of("plain", context, plain, lambda part: FlatUpdate(rule, part.regions, groups)),
        ]
    )


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


class BlockedUpdate(SavedState):
    """A rule with two moments on regions whose moments are kept in blocks.

    Args:
        name: the optimizer, for messages.
    """

    def __init__(self, name: str, rule: Rule, regions: Sequence[Region]) -> None:
        self._name, self._rule, self._regions = name, rule, regions
        self._state = [[_new_state(region, signed, name) for signed in _SIGNED] for region in regions]
        self._steps = [[0] * len(region.layout.segments) for region in regions]

    def apply(self, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        """See UpdateMethod."""
        refuse_unsupported(self._name, hyper)
        for region, state, steps in zip(self._regions, self._state, self._steps, strict=True):
            on = active[region.first_flag : region.first_flag + len(steps)]
            for run in region.runs(on, steps):
                for low, high in _block_ranges(region, run.start, run.end):
                    self._update_part(region, state, slice(low, high), hyper[run.group], run.step, coefficient)
            for index, was_active in enumerate(on):
                steps[index] += was_active and region.groups[index] >= 0

    def _update_part(
        self,
        region: Region,
        state: Sequence[BlockedState],
        cut: slice,
        hyper: Mapping[str, Any],
        step: int,
        coefficient: float,
    ) -> None:
        """Update whole blocks of elements that have the same hyper-parameters and step."""
        grad = scaled(region.grad()[cut], coefficient)
        moments = [kind.read(cut.start, cut.stop) for kind in state]
        self._rule.update(region.master[cut], grad, moments, hyper, step)
        for kind, values in zip(state, moments, strict=True):
            kind.write(cut.start, values)
        if region.param is not None:
            region.param[cut].copy_(region.master[cut])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Codes and scales by region."""
        return {
            f"{number}.{name}_{part}": tensor
            for number, state in enumerate(self._state)
            for name, kind in zip(self._rule.state, state, strict=True)
            for part, tensor in (("codes", kind.codes), ("scale", kind.scale))
        }

    def state_keys(self, region: int) -> tuple[str, ...]:
        """See SavedState."""
        return tuple(f"{name}_{part}" for name in self._rule.state for part in ("codes", "scale"))

    def value_keys(self, region: int) -> tuple[str, ...]:
        """See SavedState."""
        return self._rule.state

    def elements_per_value(self, region: int, key: str) -> int:
        """See SavedState."""
        blocks = self._regions[region].blocks
        assert blocks is not None
        return 8 // blocks.bits if key.endswith("_codes") else blocks.size

    def state_parts(self) -> Iterator[StatePart]:
        """See SavedState."""
        for number, (region, state) in enumerate(zip(self._regions, self._state, strict=True)):
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
        cut = piece_of(self._regions[region], index)
        return {
            f"{name}_{part}": RowPart.of(stored.values)
            for name, kind in zip(self._rule.state, self._state[region], strict=True)
            for part, stored in kind.packed(cut.start, cut.stop).stored.items()
        }


def _new_state(region: Region, signed: bool, name: str) -> BlockedState:
    assert region.blocks is not None
    return BlockedState(region.master.numel(), region.blocks, signed=signed, device=region.master.device, what=name)


def _block_ranges(region: Region, start: int, end: int) -> Iterator[tuple[int, int]]:
    """[start, end) in parts of whole blocks, so that the float32 memory of a step is bounded."""
    assert region.blocks is not None
    step = max(1, _PART_NUMEL // region.blocks.size) * region.blocks.size
    for low in range(start, end, step):
        yield low, min(low + step, end)
