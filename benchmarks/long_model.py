"""benchmarks.llama's decoder for one long sequence: blocks are computed again, feed-forward and loss go in tiles.

    x -> [ norm, attention, + | norm, feed-forward in tiles, + ] x layers, each checkpointed -> norm -> loss in tiles

So what stands of the whole sequence is a block's input for each block, what one block's attention needs, and nothing as
wide as the feed-forward or the vocabulary. Over the ranks of a group each has a part of the sequence, and attention
exchanges heads for tokens and back (Ulysses, arXiv 2309.14509), so that every rank has the whole sequence for some
heads. Tiles and exchange are zeroshard's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.llama import BASE, EPS, Attention, Embedding, FeedForward, Linear, Shape, initialize, recomputed, rotate
from benchmarks.llama import SIZES as SHORT
from zeroshard.parallel.exchange import exchange
from zeroshard.parallel.sequence_tiles import tiled, tiled_loss
from zeroshard.planner.trace.divided import Parts
from zeroshard.planner.trace.sources import ModelSource
from zeroshard.planner.trace.workload import Workload

SIZES = {"tiny": SHORT["tiny"], "1b": SHORT["1b"], "8b": Shape(4096, 32, 32, 8, 14336, 128256)}
KERNELS = {
    "default": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
}
"""The kernel of attention, and torch's plain operations where it can't (on a CPU, say). One kernel of a GPU each: where
two may be taken, torch 2.11 chose another one in the recomputation than in the forward, which checkpoints refuse."""


@dataclass(frozen=True)
class Heads:
    """What the planner asks of a model's config: how many heads ranks would divide."""

    num_attention_heads: int


class LongAttention(Attention):
    """`Attention` of a part of the sequence; `group` are the ranks that have the others, None for a whole one."""

    def __init__(self, shape: Shape, kernels: str) -> None:
        super().__init__(shape)
        self.kernels = kernels
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        query = rotate(self._split(self.query(x), self.heads), cos, sin)
        key = rotate(self._split(self.key(x), self.kv_heads), cos, sin)
        value = self._split(self.value(x), self.kv_heads)
        if self.group is not None:
            query, key, value = (exchange(one, self.group, 1, 2) for one in (query, key, value))
        with sdpa_kernel(KERNELS[self.kernels]):
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=self.heads != self.kv_heads
            )
        if self.group is not None:
            mixed = exchange(mixed, self.group, 2, 1)
        return self.out(mixed.transpose(1, 2).flatten(2))


class LongBlock(nn.Module):
    """Attention and a feed-forward that sees `tile` tokens at a time."""

    def __init__(self, shape: Shape, tile: int, kernels: str) -> None:
        super().__init__()
        self.tile = tile
        self.attention_norm = nn.RMSNorm(shape.dim, eps=EPS)
        self.attention = LongAttention(shape, kernels)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=EPS)
        self.ffn = FeedForward(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + tiled(self.ffn, self.ffn_norm(x), -(-x.shape[1] // self.tile))


class LongLlama(nn.Module):
    """Gives the mean loss in nats, float32, of this rank's part: int64 ids and targets of shape (batch, tokens).

    Attributes:
        loss_tile, ffn_tile: tokens of which logits, and activations as wide as the feed-forward, stand at a time.
        part: number of this rank's part in the sequence; all are equally long.
    """

    def __init__(self, shape: Shape, *, loss_tile: int, ffn_tile: int, kernels: str) -> None:
        super().__init__()
        self.shape, self.loss_tile, self.part = shape, loss_tile, 0
        self.config = Heads(shape.heads)
        self.embed = Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList(LongBlock(shape, ffn_tile, kernels) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=EPS)
        self.head = Linear(shape.dim, shape.vocabulary)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        cos, sin = rotary_table(self.part * ids.shape[1], ids.shape[1], self.shape.head_dim, x)
        for block in self.blocks:
            x = recomputed(block, x, cos, sin)
        return tiled_loss(self._loss, self.norm(x), targets, tiles=-(-ids.numel() // self.loss_tile))

    def _loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(hidden).float(), targets)


def rotary_table(first: int, length: int, head_dim: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`llama.rotary_table` of tokens from `first` on."""
    rates = BASE ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim)
    places = torch.arange(first, first + length, device=like.device, dtype=torch.float32)
    angles = torch.outer(places, rates)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


@dataclass(frozen=True)
class Long:
    """A model for long sequences, see LongLlama."""

    size: str
    loss_tile: int
    ffn_tile: int
    kernels: str

    @property
    def shape(self) -> Shape:
        return SIZES[self.size]

    def make(self) -> nn.Module:
        """The model, on whatever device the context says."""
        return LongLlama(self.shape, loss_tile=self.loss_tile, ffn_tile=self.ffn_tile, kernels=self.kernels)

    def work(self, length: int, ranks: int) -> Workload:
        """The planner's view of a rank's part of one sequence of `length` tokens."""

        def batch(_: nn.Module, samples: int, length: int) -> dict[str, torch.Tensor]:
            return {name: torch.empty(samples, length, dtype=torch.int64) for name in ("ids", "targets")}

        return Workload(ModelSource(self.size, self.make, batch), 1, length, parts=Parts(sequence=ranks))


def blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The layers of a model that `Long.make` has made."""
    assert isinstance(model, LongLlama)
    return model.blocks


def fill(model: nn.Module, device: torch.device) -> None:
    """Values for a model that was built on the meta device."""
    initialize(model)


def place(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tell the model which ranks have the other parts of its sequence."""
    assert isinstance(model, LongLlama)
    group = mesh.get_group("sp")
    model.part = group.rank()
    for block in model.blocks:
        assert isinstance(block, LongBlock)
        block.attention.group = group
