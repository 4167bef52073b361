"""Parameters on their way through a gather as 8-bit codes, with a float32 scale for each block of elements.

    record of a rank    [ codes of its shard, 1 byte each | scales, 4 bytes per block ]
    code                round(value / scale), from -127 to 127        scale    largest magnitude of the block / 127

This is qwZ (Wang et al. 2023, arXiv:2306.10209, section 4.1): what all ranks compute with are the decoded values, also
of the shard that a rank holds exactly, so that they agree. A block with an inf or NaN decodes to NaN, as it should be
seen. Rejected: one scale per shard, whose largest element decides the error of all others.
"""

from __future__ import annotations

import torch

from zeroshard.plan.placement import Blocks

_LARGEST = 127.0


@torch.no_grad()
def encode(values: torch.Tensor, record: torch.Tensor, blocks: Blocks) -> None:
    """Write the codes and scales of `values` (flat, whole blocks) into `record`, uint8."""
    rows = values.view(-1, blocks.size).float()
    scale = rows.abs().amax(dim=1).div_(_LARGEST)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    codes, scales = _parts(record.view(1, -1), values.numel())
    codes.view(rows.shape).copy_(rows.mul(inverse[:, None]).round_())
    scales[0].copy_(scale)


@torch.no_grad()
def decode(records: torch.Tensor, ranks: int, values: torch.Tensor, blocks: Blocks) -> None:
    """Write what the records of so many ranks, one after the other, stand for into `values`, flat."""
    codes, scales = _parts(records.view(ranks, -1), values.numel() // ranks)
    rows = codes.unflatten(1, (-1, blocks.size))
    values.view(rows.shape).copy_(rows * scales[:, :, None])


def _parts(records: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of each record, in which there are codes of `numel` elements."""
    return records[:, :numel].view(torch.int8), records[:, numel:].view(torch.float32)
