"""Training in one process on the data of all ranks, without zeroshard: what every way to divide a model must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

CLIP = 0.5
Step = tuple[float, float]
"""Loss over all data, and gradient norm."""
State = dict[str, torch.Tensor]


def alone(
    model: nn.Module,
    losses: Callable[[nn.Module, int], Iterable[torch.Tensor]],
    steps: int = 3,
    *,
    lr: float = 1e-3,
    clip: float = CLIP,
    eps: float = 1e-8,
) -> tuple[list[Step], State]:
    """Losses, norms, and parameters with their second moments (`NAME.exp_avg_sq`) after some steps of AdamW.

    Args:
        losses: of a step, one for each backward; their sum is the step's loss.
        clip: infinity for no clipping.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=eps)
    found: list[Step] = []
    for step in range(steps):
        total = 0.0
        for loss in losses(model, step):
            loss.backward()
            total += float(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, float(norm)))
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            state[f"{name}.exp_avg_sq"] = optimizer.state[parameter]["exp_avg_sq"]
    return found, state
