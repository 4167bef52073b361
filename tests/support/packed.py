"""A model whose large weights are frozen codes under a class of their own, as libraries of quantized weights do it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from tests.support.models import WIDTH, Task, square_loss

LEVELS = 15


class Codes(nn.Parameter):
    """Two codes of 4 bits in a byte, seen as `storage`; what decodes them hangs on the object."""

    scale: torch.Tensor
    whole: torch.Size

    @staticmethod
    def of(weight: torch.Tensor, storage: torch.dtype) -> Codes:
        scale = weight.abs().amax() / (LEVELS // 2)
        codes = (weight / scale).round().to(torch.int8).add(LEVELS // 2).to(torch.uint8).flatten()
        packed = (codes[::2] << 4 | codes[1::2]).view(storage)
        self = torch.Tensor._make_subclass(Codes, packed, False)
        self.scale, self.whole = scale, weight.shape
        return self

    def bfloat16(self, *_: Any, **__: Any) -> NoReturn:
        """Codes are not cast."""
        raise TypeError("codes are no plain numbers")

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        raw = self.detach().as_subclass(torch.Tensor).contiguous().view(torch.uint8)
        codes = torch.stack((raw >> 4, raw & 15), dim=-1).flatten().to(torch.float32) - LEVELS // 2
        return (codes * self.scale).view(self.whole).to(dtype)


class PackedLinear(nn.Module):
    """y = W x with W in codes, and a trained correction of low rank."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        self.weight = Codes.of(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, storage)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight.decoded(x.dtype).T + x @ self.down.T @ self.up.T)


class PackedStack(nn.Module):
    """Three such layers and a head."""

    def __init__(self, storage: torch.dtype = torch.uint8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PackedLinear(storage) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def packed_task(storage: torch.dtype) -> Task:
    def model(*_: Any) -> nn.Module:
        return PackedStack(storage)

    return Task(model, square_loss)
