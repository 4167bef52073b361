"""Sum of squares over many flat tensors in one launch, in float64.

    table, a row per tile:   [ address of its first element | elements ]        one launch per dtype
    partial sums (tiles,)  --sum-->  one float64

The addresses are static (gradients rest where the plan put them), so the table is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NORM_TILE = 16_384


@dataclass(frozen=True)
class _Launch:
    like: torch.Tensor
    table: torch.Tensor
    partial: torch.Tensor


class SquaredNorm:
    """The sum of squares of `tensors`, which must stay where they are.

    Args:
        tensors: contiguous, on one device; float32, bfloat16 or float16.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._tensors = list(tensors)
        self._device = device
        self._launches = [
            self._plan(dtype) for dtype in dict.fromkeys(t.dtype for t in tensors) if device.type == "cuda"
        ]

    def _plan(self, dtype: torch.dtype) -> _Launch:
        rows = [
            (tensor.data_ptr() + low * tensor.element_size(), min(NORM_TILE, tensor.numel() - low))
            for tensor in self._tensors
            if tensor.dtype == dtype
            for low in range(0, tensor.numel(), NORM_TILE)
        ]
        table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2).to(self._device)
        like = next(tensor for tensor in self._tensors if tensor.dtype == dtype)
        return _Launch(like, table, torch.empty(len(rows), dtype=torch.float64, device=self._device))

    def into(self, total: torch.Tensor) -> None:
        """Write the sum into `total`, a float64 scalar; nothing waits for the device."""
        if self._device.type != "cuda":
            parts = [torch.linalg.vector_norm(tensor.double()).square() for tensor in self._tensors]
            total.copy_(torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64))
            return
        total.zero_()
        for launch in self._launches:
            if launch.table.shape[0]:
                _compiled()[(launch.table.shape[0],)](
                    launch.table, launch.partial, launch.like, TILE=NORM_TILE, num_warps=8
                )
                total.add_(launch.partial.sum())


def _compiled() -> Any:
    from zeroshard.optim.kernels.norm_triton import tile_squares

    return tile_squares
