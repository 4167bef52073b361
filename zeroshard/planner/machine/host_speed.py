"""Measures how fast this machine's host issues a model's kernels, which bounds steps with little work on the GPU.

    a small decoder, forward and backward        seconds until the last kernel is issued, the shortest of several
    the same, traced by the planner              launches, counted as in every trace

Their quotient replaces the 37 us of an H100 machine. Sizes are so small that a GPU waits for the host all the time.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional

from zeroshard.planner.trace.model_trace import trace
from zeroshard.sharding.units import find_units

LAYERS, DIM, HEADS, LENGTH = 12, 64, 4, 16
REPETITIONS = 8


class Block(nn.Module):
    """A pre-norm block of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.mixed, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.mixed(self.first(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.up(self.second(x))))


def launch_seconds(device: torch.device) -> float:
    """Seconds in which the host issues one kernel of a model: forward, autograd and Python around it."""
    with device:
        model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(torch.bfloat16)
        batch = torch.randn(1, LENGTH, DIM, dtype=torch.bfloat16)
    _issue(model, batch)
    return min(_issue(model, batch) for _ in range(REPETITIONS)) / launches()


def launches() -> int:
    """Kernels of one forward and backward, as the planner counts them."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(torch.bfloat16)
        batch = torch.empty(1, LENGTH, DIM, dtype=torch.bfloat16)
    traced = trace(model, find_units(model), (batch,), {}, loss=_loss, tokens=LENGTH)
    return sum(segment.launches for segment in traced.segments)


def _issue(model: nn.Module, batch: torch.Tensor) -> float:
    model.zero_grad(set_to_none=True)
    if batch.device.type == "cuda":
        torch.cuda.synchronize(batch.device)
    began = time.perf_counter()
    _loss(model(batch)).backward()
    return time.perf_counter() - began


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()
