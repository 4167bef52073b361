"""A small GPT that predicts letters of real text (the topics of Python's help), and the windows of a training on it."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

from tests.support.models import Block

WIDTH, LENGTH, BATCH, LETTERS = 64, 64, 8, 128
LAST = 10
"""One part of so many of the steps is averaged to the final loss."""


class Gpt(nn.Module):
    """Predicts the next letter."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.letters(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text() -> torch.Tensor:
    """All letters, int64."""
    letters = "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    return torch.frombuffer(bytearray(letters), dtype=torch.uint8).long()


class Windows:
    """Windows of the text in an order that a seed and a rank give."""

    def __init__(self, text: torch.Tensor, seed: int, rank: int) -> None:
        self._text = text
        self._draws = torch.Generator().manual_seed(1000 * seed + rank)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Mean cross-entropy of the next windows, float32, in nats."""
        starts = torch.randint(len(self._text) - LENGTH - 1, (BATCH,), generator=self._draws)
        windows = torch.stack([self._text[start : start + LENGTH + 1] for start in starts.tolist()])
        return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())


def final_loss(model: nn.Module, optimizer: torch.optim.Optimizer, windows: Windows, steps: int) -> float:
    """Train so many steps; the mean loss of the last of them on this rank, in nats."""
    losses = torch.zeros(steps)
    for step in range(steps):
        loss = windows.loss(model)
        losses[step] = loss.detach()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(losses[-max(1, steps // LAST) :].mean())
