"""A user's own module, as `zeroshard plan tests.planner.zoo:make_tiny` finds it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

WIDTH = 64


class Tiny(nn.Module):
    """A few blocks on vectors; gives no loss but its output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            vectors = block(vectors)
        return vectors


def make_tiny() -> tuple[nn.Module, Any]:
    return Tiny(), lambda samples, length: {"vectors": torch.empty(samples, length, WIDTH)}


def make_unknown() -> nn.Module:
    return Tiny()


def talk() -> tuple[nn.Module, Any]:
    """Prints, and is also to be had by a name that reads as an emoji's."""
    print("printed by the factory")
    return make_tiny()


setattr(sys.modules[__name__], "m:", talk)
