"""The small transformer with experts in place of its mlp, in the form of transformers' models, and its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.support.parallel_model import CLIP, WIDTH, Transformer

EXPERTS, CHOSEN = 4, 2
NEVER = -1e9


class Experts(nn.Module):
    """All experts of a layer in 3-D weights."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(0.2 * torch.randn(experts, 4 * WIDTH, WIDTH))
        self.down_proj = nn.Parameter(0.2 * torch.randn(experts, WIDTH, 2 * WIDTH))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        found = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            place, row = torch.where(torch.eq(top_k_index.T, expert))
            if not row.numel():
                continue
            gate, up = F.linear(hidden_states[row], self.gate_up_proj[expert]).chunk(2, dim=-1)
            made = F.linear(F.silu(gate) * up, self.down_proj[expert])
            found = found.index_add(0, row, made * top_k_weights[row, place, None])
        return found


class ExpertLayer(nn.Module):
    """Chooses some experts for each token.

    Args:
        bias: added to what the router says of each expert, by which it prefers some, and never chooses others.
        chosen: experts of each token.
    """

    def __init__(self, bias: Sequence[float], chosen: int = CHOSEN) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(WIDTH, len(bias), bias=False)
        self.experts = Experts(len(bias))
        self.register_buffer("bias", torch.tensor(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        probabilities = torch.softmax(self.gate(rows) + self.bias, dim=-1)
        weights, chosen = torch.topk(probabilities, self.chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(rows, chosen, weights).view_as(x)


EVEN = (0.0,) * EXPERTS
UNEVEN = (0.5, 0.0, 0.2, -0.3)
ONE_RANK = (1.0, 0.0, NEVER, NEVER)
"""The experts of the second half get no token of any rank."""


def build(bias: Sequence[float] = EVEN, chosen: int = CHOSEN) -> Transformer:
    """The same model in every process."""
    torch.manual_seed(0)
    model = Transformer()
    for block in model.blocks:
        block.mlp = ExpertLayer(bias, chosen)  # pyright: ignore[reportAttributeAccessIssue]
    return model


@dataclass(frozen=True)
class Layout:
    """How ranks are divided, and what ZeRO does on them."""

    data: int
    experts: int
    stage: int

    def __str__(self) -> str:
        return f"dp {self.data} x ep {self.experts}, stage {self.stage}"


def sharded(layout: Layout, bias: Sequence[float] = EVEN, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model on all ranks in a layout."""
    mesh = init_device_mesh("cpu", (layout.data, layout.experts), mesh_dim_names=("dp_shard", "ep"))
    model = build(bias)
    given = {"plan": layout.stage, "clip_norm": CLIP, **options}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return zeroshard.shard(model, optimizer, mesh=mesh, **given)
