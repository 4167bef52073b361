"""The model of the GPU benchmarks: a decoder of Llama's shape, the same code for every engine.

    ids (batch, length) -> embed -> [ norm, attention, + | norm, SwiGLU, + ] x layers -> norm -> head -> mean loss

Root mean square norms (Zhang and Sennrich 2019, arXiv:1910.07467), rotary positions (Su et al. 2021, arXiv:2104.09864),
grouped queries (Ainslie et al. 2023, arXiv:2305.13245) and a gated feed-forward (Shazeer 2020, arXiv:2002.05202); the
head is not tied to the embedding.

Every layer fills its own parameters in `reset_parameters`, which torch's constructors call: so the model may be built
on any device, under a context that defers or divides parameters, or on the meta device and filled later by
`initialize`. Rejected: a model from a library, whose kernels and defaults change from release to release.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

STD = 0.02
BASE = 10000.0
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `kv_heads` divides `heads`, and `heads` divides `dim`."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.ffn + 2 * self.dim
        return self.layers * block + 2 * self.vocabulary * self.dim + self.dim

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations that forward and backward of one token need.

        Six per weight of a matrix product; the embedding is a look-up and counts nothing. Causal attention adds six
        per layer, width and position on average. What activation checkpointing computes again is not counted.
        """
        return 6.0 * (self.numel - self.vocabulary * self.dim) + 6.0 * self.layers * self.dim * length


SIZES = {
    "tiny": Shape(256, 4, 8, 4, 1024, 2048),
    "1b": Shape(2048, 16, 32, 8, 8192, 32000),
    "7b": Shape(4096, 32, 32, 32, 11008, 32000),
    "13b": Shape(5120, 40, 40, 40, 13824, 32000),
    "14b": Shape(5120, 43, 40, 40, 13824, 32000),
    "20b": Shape(5120, 63, 40, 40, 13824, 32000),
    "30b": Shape(5120, 94, 40, 40, 13824, 32000),
}
"""Of their width the largest by benchmarks.largest: `14b` on one GPU of 80 GB with 128 GiB of host memory, `20b` on one
of 141 GB with as much host memory and 60 GiB of disk. `30b` fits there with moments in 8 bits."""


class Linear(nn.Linear):
    """A matrix without bias, normally distributed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=STD)


class Embedding(nn.Embedding):
    """A table of token vectors, normally distributed."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=STD)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries, (batch, length, dim) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.query = Linear(shape.dim, shape.dim)
        self.key = Linear(shape.dim, shape.kv_heads * shape.head_dim)
        self.value = Linear(shape.dim, shape.kv_heads * shape.head_dim)
        self.out = Linear(shape.dim, shape.dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        query = rotate(self._split(self.query(x), self.heads), cos, sin)
        key = rotate(self._split(self.key(x), self.kv_heads), cos, sin)
        value = self._split(self.value(x), self.kv_heads)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU, (batch, length, dim) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Linear(shape.dim, shape.ffn)
        self.up = Linear(shape.dim, shape.ffn)
        self.down = Linear(shape.ffn, shape.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=EPS)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=EPS)
        self.ffn = FeedForward(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


def recomputed(block: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    """The block, run again in the backward; nothing in it is random, and a graph can't save a random state."""
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)


class Llama(nn.Module):
    """Gives the mean loss in nats, float32, for int64 ids and targets of shape (batch, length).

    Args:
        checkpointing: keep only what goes into a block, and compute the rest again in the backward.
    """

    def __init__(self, shape: Shape, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.shape, self.checkpointing = shape, checkpointing
        self.embed = Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=EPS)
        self.head = Linear(shape.dim, shape.vocabulary)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        cos, sin = rotary_table(ids.shape[1], self.shape.head_dim, x)
        for block in self.blocks:
            x = recomputed(block, x, cos, sin) if self.checkpointing else block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def compile_blocks(self) -> None:
        """Compile each block by itself: one graph serves all of them, and collectives stay between the graphs."""
        for block in self.blocks:
            block.compile()


def rotary_table(length: int, head_dim: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of shape (length, head_dim / 2), made in float32, with the dtype and device of `like`."""
    rates = BASE ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), rates)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + head_dim / 2) of the last dim of (batch, heads, length, head_dim) by their angles."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)  # they differ under autocast, where the table follows the embedding
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def initialize(model: nn.Module) -> None:
    """Fill every parameter of a model that was built on the meta device and has got storage since."""
    for module in model.modules():
        if isinstance(module, Linear | Embedding | nn.RMSNorm):
            module.reset_parameters()
