"""The units of deep models are found in a time that grows with their depth, not with its square."""

from __future__ import annotations

import time

import torch
from torch import nn

from zeroshard.sharding.units import find_units


def _model(blocks: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(blocks)))


def _seconds(blocks: int) -> float:
    """Of the processor, the least of three."""
    model, best = _model(blocks), float("inf")
    for _ in range(3):
        began = time.process_time()
        assert len(find_units(model)) == blocks + 1
        best = min(best, time.process_time() - began)
    return best


def test_eight_times_as_many_blocks_take_some_eight_times_as_long() -> None:
    """The square would be 64 times."""
    assert _seconds(1600) < 25 * _seconds(200)
