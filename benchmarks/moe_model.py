"""Mixtures of experts of Qwen3's kind, by transformers' own model from a config: nothing is downloaded.

    ids -> embed -> [ norm, attention, + | norm, router, 8 of 128 experts, + ] x layers -> norm -> head -> mean loss

Experts are 3-D weights, multiplied by torch's grouped_mm; attention is scaled_dot_product_attention. With `tiles` the
head and the loss see one tile of the tokens at a time, so that logits never stand whole: at a vocabulary of 151936 they
would take more than the experts. Rejected: a model of the benchmarks' own; what is to be shown is that those of
transformers are taken as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.llama import STD
from zeroshard.parallel.sequence_tiles import tiled_loss
from zeroshard.planner.trace.divided import Parts
from zeroshard.planner.trace.sources import ModelSource
from zeroshard.planner.trace.workload import Workload


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, without its layers."""

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    ffn: int
    vocabulary: int

    @property
    def attention(self) -> int:
        """Weights of a layer's attention with its norms."""
        return 2 * self.dim * self.head_dim * (self.heads + self.kv_heads) + 2 * self.head_dim

    def numel(self, layers: int) -> int:
        """Parameters of the whole model."""
        layer = self.attention + self.dim * (3 * self.experts * self.ffn + self.experts + 2)
        return layers * layer + 2 * self.vocabulary * self.dim + self.dim

    def flops_per_token(self, layers: int, length: int) -> float:
        """Of forward and backward of a token: six per weight that it meets, and causal attention on average."""
        layer = self.attention + self.dim * (3 * self.chosen * self.ffn + self.experts)
        attention = 6.0 * self.heads * self.head_dim * length
        return 6.0 * (layers * layer + self.vocabulary * self.dim) + layers * attention


SIZES = {
    "30b-a3b": Shape(2048, 32, 4, 128, 128, 8, 768, 151936),
    "tiny": Shape(64, 4, 2, 16, 8, 2, 32, 512),
}
"""`30b-a3b` is Qwen3-30B-A3B, which has 48 layers; `tiny` is to try a command."""


@dataclass(frozen=True)
class Moe:
    """A model: its shape, layers and how it is computed.

    Attributes:
        tiles: of the tokens, for head and loss; 0 for all at once.
    """

    size: str
    layers: int
    checkpointing: bool
    tiles: int

    @property
    def shape(self) -> Shape:
        return SIZES[self.size]

    def make(self) -> nn.Module:
        """The model, on whatever device the context says."""
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        shape = self.shape
        untyped: dict[str, Any] = {
            "head_dim": shape.head_dim,
            "attn_implementation": "sdpa",
            "experts_implementation": "grouped_mm",
        }
        config = Qwen3MoeConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.dim,
            intermediate_size=shape.ffn * shape.chosen,  # of layers without experts, of which there are none
            num_hidden_layers=self.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            moe_intermediate_size=shape.ffn,
            num_experts=shape.experts,
            num_experts_per_tok=shape.chosen,
            norm_topk_prob=True,
            initializer_range=STD,
            tie_word_embeddings=False,
            use_cache=False,
            **untyped,
        )
        model = Qwen3MoeForCausalLM(config)
        if self.checkpointing:
            _checkpoint(model)
        return WithLoss(model, self.tiles).train()

    def work(self, samples: int, length: int, experts: int) -> Workload:
        """The planner's view of a rank's part, of whose experts `experts` ranks have a part each."""

        def batch(_: nn.Module, samples: int, length: int) -> dict[str, torch.Tensor]:
            return {name: torch.empty(samples, length, dtype=torch.int64) for name in ("ids", "targets")}

        source = ModelSource(f"{self.size}, {self.layers} layers", self.make, batch)
        return Workload(source, samples, length, parts=Parts(experts=experts))


class WithLoss(nn.Module):
    """A causal model of transformers with its mean loss in nats, float32; ids and targets are int64 (batch, length)."""

    def __init__(self, model: Any, tiles: int) -> None:
        super().__init__()
        self.inner, self.tiles = model, tiles

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.inner.model(input_ids=ids).last_hidden_state
        if self.tiles:
            return tiled_loss(self._loss, hidden, targets, tiles=self.tiles)
        return self._loss(hidden.flatten(0, 1), targets.flatten())

    def _loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.inner.lm_head(hidden).float(), targets)


def import_model() -> None:
    """Load transformers' code, which takes seconds that would count as those of building a model."""
    importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")


def blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The layers of a model that `Moe.make` has made."""
    assert isinstance(model, WithLoss)
    return model.inner.model.layers


@torch.no_grad()
def fill(model: nn.Module, device: torch.device) -> None:
    """Values for a model that was built on the meta device: as transformers would draw them, and its rotary table."""
    assert isinstance(model, WithLoss)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)  # of norms; nothing else has one dim
        else:
            nn.init.normal_(parameter, std=STD)
    table = model.inner.model.rotary_emb
    with device:
        model.inner.model.rotary_emb = type(table)(config=table.config)


def _checkpoint(model: Any) -> None:
    """Compute blocks again in the backward; the method has another name in newer versions."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    switch = next(found for name in names if callable(found := getattr(model, name, None)))
    switch({"use_reentrant": False, "preserve_rng_state": False})
