"""Quantizes values that ranks send each other to codes of 8 or 4 bits, with a float32 scale per block of elements.

    record      [ codes | scales, 4 bytes per block ]      one for each rank that sends or gets a part
    code        round(value / scale), from -127 to 127 or from -7 to 7        scale    largest magnitude / 127 or / 7
    4 bits      byte i of a block has element i in its lower half and element size / 2 + i in its upper one

It is used for gathers of parameters (qwZ) and sums of gradients (qgZ; Wang et al. 2023, arXiv:2306.10209, sections 4.1
and 4.3). All ranks compute with the decoded values, even of their own shard, so that they agree. A block with an inf or
NaN decodes to NaN, so that the error shows. Rejected: one scale per shard, whose largest element would decide the error
of all others; two neighbouring elements in one byte, which reads and writes every other element.
"""

from __future__ import annotations

import torch

from zeroshard.engine.memory import kernel_codes, native_codes
from zeroshard.plan.hops import Feedback
from zeroshard.plan.placement import Blocks

_LARGEST = {8: 127.0, 4: 7.0}
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Below it 1 / scale overflows; such blocks are 0."""


@torch.no_grad()
def encode(
    values: torch.Tensor,
    records: torch.Tensor,
    blocks: Blocks,
    *,
    ranks: int = 1,
    error: torch.Tensor | None = None,
    feedback: Feedback | None = None,
) -> None:
    """Write the codes and scales of `values` (flat, whole blocks) into the records of so many ranks, uint8.

    Args:
        error: rounding errors of earlier codes, as large as `values`: added first, then renewed as `feedback` says.
    """
    by = kernel_codes if values.is_cuda else native_codes
    if by.encode(values, records, blocks, ranks, error, feedback):
        return
    rows = values.view(-1, blocks.size).float()
    if error is not None:
        rows = rows + error.view(rows.shape)
    scale = rows.abs().amax(dim=1).div_(_LARGEST[blocks.bits])
    inverse = torch.where(scale >= _LEAST_SCALE, 1.0 / scale, 0.0)
    rounded = rows.mul(inverse[:, None]).round_()
    codes, scales = _parts(records.view(ranks, -1), values.numel() // ranks, blocks)
    scales.copy_(scale.view(scales.shape))
    if blocks.bits == 8:
        codes.view(ranks, -1, blocks.size).copy_(rounded.view(ranks, -1, blocks.size))
    else:
        low, high = rounded.to(torch.int8).view(ranks, -1, 2, blocks.size // 2).unbind(2)
        codes.unflatten(1, (-1, blocks.size // 2)).copy_((low & 15) | (high << 4))
    if error is not None:
        assert feedback is not None
        _keep(error, rows.sub_(rounded.mul_(scale[:, None])), feedback)


def _keep(error: torch.Tensor, left_out: torch.Tensor, feedback: Feedback) -> None:
    """Store the rounding error that is added next time; values that are not finite are stored as 0."""
    left_out = left_out.view(-1)
    if feedback.beta:
        left_out = left_out.mul_(1 - feedback.beta).add_(error, alpha=feedback.beta)
    error.copy_(torch.nan_to_num_(left_out, nan=0.0, posinf=0.0, neginf=0.0))


@torch.no_grad()
def decode(records: torch.Tensor, ranks: int, values: torch.Tensor, blocks: Blocks, *, add: bool = False) -> None:
    """Decode the records of all ranks, one after the other, into the flat `values`, or add them there."""
    by = kernel_codes if values.is_cuda else native_codes
    if by.decode(records, ranks, values, blocks, add=add):
        return
    codes, scales = _parts(records.view(ranks, -1), values.numel() // ranks, blocks)
    rows = _rows(codes, blocks)
    found = rows * scales[:, :, None]
    target = values.view(rows.shape)
    target.add_(found) if add else target.copy_(found)


@torch.no_grad()
def decode_sum(records: torch.Tensor, ranks: int, values: torch.Tensor, blocks: Blocks, *, add: bool) -> None:
    """Write the float32 sum of the decoded records, in the order of ranks, into `values`, or add it there."""
    by = kernel_codes if values.is_cuda else native_codes
    if by.decode(records, ranks, values, blocks, add=add, summed=True):
        return
    codes, scales = _parts(records.view(ranks, -1), values.numel(), blocks)
    rows = _rows(codes, blocks)
    total = rows[0] * scales[0][:, None]
    for rank in range(1, ranks):
        total.add_(rows[rank] * scales[rank][:, None])
    flat = total.view(values.shape)
    values.add_(flat) if add else values.copy_(flat)


def _rows(codes: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The codes of each record by block, as int8."""
    if blocks.bits == 8:
        return codes.unflatten(1, (-1, blocks.size))
    packed = codes.unflatten(1, (-1, blocks.size // 2))
    return torch.cat(((packed << 4) >> 4, packed >> 4), dim=2)


def _parts(records: torch.Tensor, numel: int, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of each record, in which there are codes of `numel` elements."""
    nbytes = blocks.code_nbytes(numel)
    return records[:, :nbytes].view(torch.int8), records[:, nbytes:].view(torch.float32)
