"""Small real models and their tasks, shared by the engine's tests.

A task is a model factory and the loss of one micro-batch. What it draws comes from the batch's own generator, so the
unsharded reference sees exactly what each rank saw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 1031  # prime, and large enough for embedding and head to be units of their own
WIDTH = 16
LENGTH = 6


@dataclass(frozen=True)
class Batch:
    """Which micro-batch this is: what its loss may depend on."""

    step: int
    micro: int
    rank: int

    def generator(self) -> torch.Generator:
        """A generator that is the same wherever this batch is drawn."""
        seed = (self.step * 1009 + self.micro) * 1009 + self.rank
        return torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal values."""
        return torch.randn(*shape, generator=self.generator())

    def tokens(self, count: int = 2, length: int = LENGTH, vocabulary: int = VOCABULARY) -> torch.Tensor:
        """Token numbers of shape (count, length)."""
        return torch.randint(vocabulary, (count, length), generator=self.generator())


@dataclass(frozen=True)
class Task:
    """A model and the loss of one micro-batch."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], torch.Tensor]


class Attention(nn.Module):
    """Causal self-attention with two heads. No bias for keys: its gradient is rounding noise, which Adam inflates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width + 1), nn.GELU(), nn.Linear(2 * width + 1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A causal language model. `tied` shares the embedding with the head."""

    def __init__(self, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def language_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Next-token cross-entropy on random tokens."""
    tokens = batch.tokens()
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def square_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean square of the output on normal input of shape (3, WIDTH)."""
    return model(batch.normal(3, WIDTH)).float().square().mean()


def tied_transformer() -> nn.Module:
    return Transformer(tied=True)


TRANSFORMER = Task(Transformer, language_loss)
TIED_TRANSFORMER = Task(tied_transformer, language_loss)
