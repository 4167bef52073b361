"""The mean over ranks of one bit per element, with error feedback on both sides.

    worker   c = value + error_w       -> sign(c), scale -> error_w = c - scale * sign(c)      whole, on each rank
             --all-to-all: each rank gets all ranks' chunks of its shard-->
    server   s = mean of those + error_s -> sign(s), scale -> error_s = s - scale * sign(s)    this rank's shard
             --all-gather--> the mean, equal on all ranks

The error of a compression is added to the next value, so that it is corrected later (Tang et al. 2021,
arXiv:2102.02888, section 4). The scale is the root mean square, so the norm does not change. Each piece of a parameter
in a shard has its own scale, since parameters differ by orders of magnitude.

    chunk   [ bits of the shard, 8 to a byte | float32 scale per piece ]      of all flat groups, one after the other
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroshard.comm.collectives import Collectives
from zeroshard.plan.compression import SCALE_NBYTES, chunk_nbytes
from zeroshard.sharding.layout import FlatLayout

Skip = Sequence[bool]


def pack(values: torch.Tensor) -> torch.Tensor:
    """Signs of (n,) values as (n / 8,) bytes; a bit is set where the value is not negative. n is a multiple of 8."""
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8).to(values.device)
    return ((values >= 0).view(-1, 8).to(torch.uint8) * weights).sum(dim=1, dtype=torch.uint8)


def unpack(bits: torch.Tensor) -> torch.Tensor:
    """(8 n,) signs, 1.0 or -1.0, of (n,) bytes."""
    shifts = torch.arange(8, dtype=torch.uint8).to(bits.device)
    return ((bits[:, None] >> shifts) & 1).reshape(-1).to(torch.float32).mul_(2).sub_(1)


@dataclass
class Errors:
    """The errors of the compressions of one flat group, float32.

    Attributes:
        worker: (numel,), of this rank's whole values.
        server: (shard numel,), of the mean of this rank's shard.
    """

    worker: torch.Tensor
    server: torch.Tensor


class OneBitMean:
    """The compressed mean of some flat buffers over all ranks.

    Args:
        layouts: of the buffers, all divided over the ranks of `peers`.
    """

    def __init__(self, layouts: Sequence[FlatLayout], peers: Collectives, device: torch.device) -> None:
        self._layouts = layouts
        self._peers = peers
        self._starts: list[int] = []
        self._chunk = 0
        for layout in layouts:
            self._starts.append(self._chunk)
            self._chunk += chunk_nbytes(layout)
        self.errors = [
            Errors(
                torch.zeros(layout.numel, dtype=torch.float32, device=device),
                torch.zeros(layout.shard_numel, dtype=torch.float32, device=device),
            )
            for layout in layouts
        ]

    def reset_errors(self) -> None:
        """Set all errors to 0, since another quantity is averaged from now on."""
        for error in self.errors:
            error.worker.zero_()
            error.server.zero_()

    def average(self, values: Sequence[torch.Tensor], skip: Sequence[Skip]) -> None:
        """Replace each buffer by its compressed mean over the ranks.

        Args:
            values: float32 (numel,) for each layout, this rank's values.
            skip: per layout and segment, equal on all ranks, whether values and errors are left unchanged.
        """
        size, rank = self._peers.size, self._peers.rank
        sent = torch.zeros(size, self._chunk, dtype=torch.uint8, device=values[0].device)
        for number, (layout, value, left_out) in enumerate(zip(self._layouts, values, skip, strict=True)):
            error = self.errors[number].worker
            for owner in range(size):
                start, end = layout.shard_range(owner)
                self._compress(number, owner, value[start:end], error[start:end], sent[owner], left_out)
        received = torch.empty_like(sent)
        split = [self._chunk] * size
        self._exchange(received, sent, split)
        means = torch.zeros(self._chunk, dtype=torch.uint8, device=sent.device)
        for number, (layout, left_out) in enumerate(zip(self._layouts, skip, strict=True)):
            mean = torch.zeros(layout.shard_numel, dtype=torch.float32, device=sent.device)
            for source in range(size):
                mean.add_(self._expand(number, rank, received[source]), alpha=1 / size)
            self._compress(number, rank, mean, self.errors[number].server, means, left_out)
        self._peers.wait(self._peers.all_gather(received.view(-1), means, "(compressed)"))
        for number, (layout, value, left_out) in enumerate(zip(self._layouts, values, skip, strict=True)):
            for owner in range(size):
                start, end = layout.shard_range(owner)
                found = self._expand(number, owner, received[owner])
                for index, low, high in layout.pieces(start, end):
                    if not left_out[index]:
                        value[start + low : start + high] = found[low:high]

    def _exchange(self, out: torch.Tensor, data: torch.Tensor, split: list[int]) -> None:
        pending = self._peers.all_to_all(out.view(-1), data.view(-1), split, split, "(compressed)", data.nbytes)
        self._peers.wait(pending)

    def _compress(
        self, number: int, owner: int, value: torch.Tensor, error: torch.Tensor, chunk: torch.Tensor, skip: Skip
    ) -> None:
        """Write the compressed form of `value + error`, a shard, into `chunk`, and its error into `error`."""
        layout = self._layouts[number]
        whole = value + error
        bits, scales = self._parts(number, chunk)
        packed = pack(whole)
        bits.copy_(packed)
        signs = unpack(packed)
        for place, (index, low, high) in enumerate(layout.pieces(*layout.shard_range(owner))):
            if skip[index]:
                continue
            piece = whole[low:high]
            scale = torch.linalg.vector_norm(piece) / (high - low) ** 0.5
            scales[place] = scale
            error[low:high] = piece - signs[low:high] * scale

    def _expand(self, number: int, owner: int, chunk: torch.Tensor) -> torch.Tensor:
        """Decompress the shard of `owner` from a chunk; padding is 0."""
        layout = self._layouts[number]
        bits, scales = self._parts(number, chunk)
        signs = unpack(bits)
        found = torch.zeros_like(signs)
        for place, (_, low, high) in enumerate(layout.pieces(*layout.shard_range(owner))):
            found[low:high] = signs[low:high] * scales[place]
        return found

    def _parts(self, number: int, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bits and scales of one flat group in a chunk."""
        layout, start = self._layouts[number], self._starts[number]
        nbits = layout.shard_numel // 8
        end = start + chunk_nbytes(layout)
        assert (end - start - nbits) % SCALE_NBYTES == 0
        return chunk[start : start + nbits], chunk[start + nbits : end].view(torch.float32)
