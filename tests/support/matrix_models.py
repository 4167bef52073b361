"""A model with matrices of all kinds, trained so that no sum over ranks depends on its order.

Only two batches have a gradient that is not zero, and a sum of two numbers and zeros is the same in any order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.models import WIDTH, Batch, Task
from tests.support.training import Setting


class MatrixBlock(nn.Module):
    """A wide and a tall matrix, a stack of matrices, a convolution's weight, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, 5) * 0.1)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.kernel = nn.Parameter(torch.randn(4, 2, 2, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        x = x + (x @ self.experts).sum(0).sum(-1, keepdim=True) + self.kernel.sum() * self.kernel.std()
        return self.conv(x[:, None])[:, 0]


class MatrixModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(MatrixBlock() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, 7)
        self.blocks[1].up.requires_grad_(False)

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        x = self.inp(x)
        for index in used:
            x = self.blocks[index](x)
        return self.lm_head(x)


def matrix_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Block 2 has no gradient in step 1."""
    return model(batch.normal(3, WIDTH), (0, 1) if batch.step == 1 else (0, 1, 2)).float().square().mean()


def two_ranks(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Ranks from 2 on have gradients that are zero."""
    return matrix_loss(model, batch) * (1.0 if batch.rank < 2 else 0.0)


def two_batches(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Of all micro-batches of all ranks only two have gradients that are not zero."""
    return matrix_loss(model, batch) * (1.0 if batch.rank == batch.micro else 0.0)


CASES = (
    (Task(MatrixModel, two_ranks), Setting(steps=4)),
    (Task(MatrixModel, two_batches), Setting(steps=3, micro=2, clip=0.5)),
)


def matrix_groups(model: nn.Module, mark: str, matrix: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Two groups of matrices with other rates, and the rest; `mark` says of each group whether it is of matrices."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [(name, p) for name, p in named if p.dim() > 1 and "lm_head" not in name]
    chosen = {id(p) for _, p in hidden}
    first = [p for name, p in hidden if "down" in name]
    second = [p for name, p in hidden if "down" not in name]
    return [
        {"params": first, mark: True, "lr": 0.02, **matrix},
        {"params": [p for _, p in named if id(p) not in chosen], mark: False, **other},
        {"params": second, mark: True, "lr": 0.01, **matrix},
    ]
