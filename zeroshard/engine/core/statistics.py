"""The one small all-reduce of a step: squared norm, check for divergence, and which parameters got a gradient.

    float64:  [ sum of squares | d | d * d | flag per trainable parameter ... ]      d: digest of this rank's operations

Squares are summed in float64, so the norm does not depend on how gradients are divided. Every rank squares only its own
part of the reduced gradients, also where it holds the whole, so all stages sum the same numbers. Digests that differ
leave a variance in d. Rejected: a norm per parameter tensor; it costs a kernel each and nothing reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.stages import Stages
from zeroshard.engine.core.runtime import Runtime
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.update_view import own_grad, own_pieces
from zeroshard.optim.kernels.norm import KERNEL_DTYPES, SquaredNorm
from zeroshard.plan.traffic import STATS_FIXED, stats_numel

CHUNK = 1 << 16
_DIGEST_BITS = 20
"""Digests are compared by so many bits: sums of their squares over 2**13 ranks are exact in float64, in any order."""
Norms = dict[tuple[int, bool], SquaredNorm]
"""By the id of a group, and whether its whole gradients are squared."""


@dataclass(frozen=True)
class Statistics:
    """What all ranks know after the exchange, on the host.

    Attributes:
        squared_norm: sum of squares of the reduced gradients, before any scaling.
        agree: whether all ranks issued the same operations so far.
        active: per trainable parameter, in plan order, whether any rank had a gradient for it.
    """

    squared_norm: float
    agree: bool
    active: tuple[bool, ...]


def exchange(
    runtime: Runtime,
    control: Collectives,
    norms: Norms,
    *,
    digest: int,
    whole: bool = False,
    stages: Stages | None = None,
) -> Statistics:
    """Sum this rank's statistics over all ranks; gradients must be reduced.

    Args:
        norms: the kernels that square gradients on a GPU; made at first use and kept, since they copy tables.
        whole: gradients are not reduced, so each rank squares all of its own; the sum only tells if they are finite.
        stages: the other pipeline stages, whose squares and divergences count, too.
    """
    device = runtime.storage.device
    values = torch.zeros(stats_numel(runtime.plan), dtype=torch.float64, device=device)
    flags: list[bool] = []
    for unit in runtime.units:
        for group, received in zip(unit.trainable, runtime.gradients.received(unit), strict=True):
            flags += received
            if group.counted:
                on_host = group.plan.grad_off_device
                values[0] += (
                    runtime.gradients.squares.total(group) if on_host else _squared_norm(group, norms, whole=whole)
                )
    values[1], values[2] = digest_terms(digest)
    values[STATS_FIXED:] = torch.tensor(flags, dtype=torch.float64)
    control.wait(control.all_reduce(values, "(step)"))
    if stages is not None:
        stages.add_statistics(values, control.size)
    squared, first, second, *counts = values.tolist()
    agree = second * control.size == first * first
    return Statistics(squared, agree, tuple(count > 0 for count in counts))


def digest_terms(digest: int) -> tuple[int, int]:
    """What a rank adds to the second and third value of the all-reduce."""
    short = digest & ((1 << _DIGEST_BITS) - 1)
    return short, short * short


def _squared_norm(group: Group, norms: Norms, *, whole: bool) -> torch.Tensor:
    """Sum of squares in float64, in tiles or chunks so that no float64 copy of the whole is made.

    Gaps between parameters are not read: where peers copy, the gaps hold old values.
    """
    values = _checked_gradient(group, whole=whole)
    pieces = [(0, values.numel())] if whole else own_pieces(group)
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    if values.is_cuda and values.dtype in KERNEL_DTYPES and find_spec("triton") is not None:
        # Chunks would be a hundred thousand launches for a rank's part of a model of 7e9 parameters.
        norm = norms.get((id(group), whole))
        if norm is None:
            norm = norms[id(group), whole] = SquaredNorm([pieces], values.device)
        norm.square(0, values)
        norm.into(total)
        return total
    for low, high in pieces:
        for chunk in values[low:high].split(CHUNK):
            wide = chunk.to(torch.float64)
            total += torch.dot(wide, wide)
    return total


def _checked_gradient(group: Group, *, whole: bool) -> torch.Tensor:
    if not whole:
        return own_grad(group)
    assert group.grad is not None
    return group.grad


def first_nonfinite(
    runtime: Runtime, control: Collectives, *, whole: bool = False, stages: Stages | None = None
) -> str:
    """Name of the first parameter, in plan order, with a reduced gradient that is not finite, and inf or NaN."""
    found = _first_of_stage(runtime, control, whole=whole)
    told = [found or ""] if stages is None else stages.gather_text(found or "")
    return next((name for name in told if name), "no single parameter (the sum of squares overflowed)")


def _first_of_stage(runtime: Runtime, control: Collectives, *, whole: bool) -> str | None:
    names = [segment.name for group in trainable_groups(runtime) for segment in group.plan.layout.segments]
    none = 2 * len(names)
    found = torch.tensor(
        [_find_nonfinite(runtime, none, whole=whole)], dtype=torch.int64, device=runtime.storage.device
    )
    control.wait(control.all_reduce(found, "(non-finite)", op=torch.distributed.ReduceOp.MIN))
    code = int(found.item())
    return None if code == none else f"{names[code // 2]} ({'NaN' if code % 2 == 0 else 'inf'})"


def trainable_groups(runtime: Runtime) -> list[Group]:
    """All trainable groups in plan order, the order of the flags."""
    return [group for unit in runtime.units for group in unit.trainable]


def _find_nonfinite(runtime: Runtime, none: int, *, whole: bool) -> int:
    position = 0
    for group in trainable_groups(runtime):
        layout, grad = group.plan.layout, _checked_gradient(group, whole=whole)
        for index, low, high in layout.pieces(*((0, layout.numel) if whole else layout.shard_range(group.rank))):
            part = grad[low:high]
            if not bool(torch.isfinite(part).all()):
                return 2 * (position + index) + (0 if bool(torch.isnan(part).any()) else 1)
        position += len(group.plan.layout.segments)
    return none
