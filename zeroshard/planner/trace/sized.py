"""A decoder of a given number of parameters, for `--params 7e9 --layers 32 --hidden 4096` without any model.

It has Llama's shape: root mean square norms, rotary positions, attention with heads 128 wide, a gated feed-forward, a
head that is not tied. The width of the feed-forward is chosen to give the number of parameters; the table's title has
the exact number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from zeroshard.errors import PlanError

HEAD_WIDTH = 128
FFN_ALIGNMENT = 64
SMALLEST, LARGEST = 10_000, 10**14


@dataclass(frozen=True)
class Sizes:
    """Sizes of the decoder."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int

    @property
    def num_attention_heads(self) -> int:
        """The heads, under the name that they have in transformers' configs."""
        return self.heads


def solve_sizes(params: float, layers: int | None, hidden: int | None, vocabulary: int = 32000) -> Sizes:
    """The sizes of a model with about `params` parameters.

    Args:
        layers, hidden: if one is missing, a width of 128 per layer is assumed.
        vocabulary: rows of the embedding and of the head.

    Raises:
        PlanError: no positive feed-forward width gives that number.
    """
    if not SMALLEST <= params <= LARGEST:
        raise PlanError(f"--params {params:g}: give the number of parameters, such as 7e9")
    for name, value in (("--layers", layers), ("--hidden", hidden)):
        if value is not None and not 1 <= value <= 10**6:
            raise PlanError(f"{name} {value}: must be between 1 and a million")
    if layers is None and hidden is None:
        hidden = max(64, round((params * 128 / 12) ** (1 / 3) / 128) * 128)
    if layers is None:
        assert hidden is not None
        layers = max(1, round((params - 2 * vocabulary * hidden) / (12 * hidden * hidden)))
    if hidden is None:
        hidden = max(64, round((params / (12 * layers)) ** 0.5 / 128) * 128)
    heads = hidden // HEAD_WIDTH if hidden % HEAD_WIDTH == 0 else max(1, hidden // 64)
    if hidden % heads or (hidden // heads) % 2:
        raise PlanError(f"--hidden {hidden}: give a multiple of 64")
    rest = params - 2 * vocabulary * hidden - layers * 4 * hidden * hidden
    ffn = round(rest / (3 * hidden * layers) / FFN_ALIGNMENT) * FFN_ALIGNMENT
    if ffn < FFN_ALIGNMENT:
        raise PlanError(
            f"--params {params:g} is too few for {layers} layers of width {hidden}: embedding, head and attention "
            f"alone have {params - rest:.3g}; give fewer layers or a smaller width"
        )
    return Sizes(layers, hidden, heads, ffn, vocabulary)


class Decoder(nn.Module):
    """Its forward returns the mean loss for int64 ids and labels of shape (batch, length)."""

    tp_plan: ClassVar[Mapping[str, str]] = {
        "embed": "embedding_rowwise",
        "layers.*.mix.q": "colwise",
        "layers.*.mix.k": "colwise",
        "layers.*.mix.v": "colwise",
        "layers.*.mix.o": "rowwise",
        "layers.*.gate": "colwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "head": "colwise_gather_output",
    }
    """How tensor parallelism divides it, in the terms of transformers' plans."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.config = self.sizes = sizes
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        width = self.sizes.hidden // self.sizes.heads
        table = torch.empty(ids.shape[1], width // 2, dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x = layer(x, table)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class _Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.width = sizes.hidden // sizes.heads
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.hidden) for _ in range(2))
        self.mix = nn.ModuleDict({name: nn.Linear(sizes.hidden, sizes.hidden, bias=False) for name in "qkvo"})
        self.gate = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        query, key, value = (self.mix[name](y).unflatten(-1, (-1, self.width)).transpose(1, 2) for name in "qkv")
        query, key = _rotate(query, table), _rotate(key, table)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix["o"](mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * table - high * table, high * table + low * table), dim=-1)
