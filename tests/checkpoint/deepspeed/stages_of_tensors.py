"""A small language model in two pipeline stages of two tensor-parallel ranks each, as a Megatron script cuts it.

`make_divided_fixtures.py` trains it with DeepSpeed. The layers are cut by hand: the vocabulary by rows with padding,
gate and up in one weight by rows (two blocks), the projection back by columns; its biases and norms are whole on each.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import distributed, nn
from torch.nn.functional import cross_entropy, layer_norm, linear, silu

WORDS, PADDED, HIDDEN, INNER, PARTS = 13, 16, 6, 10, 2
INFO = (
    "universal_checkpoint_info",
    {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": WORDS,
        "padded_vocab_size": PADDED,
        "vocabulary_parameter_patterns": [r"tied_modules.embedding.weight"],
        "tp_replicated_parameter_patterns": [r"\d+.norm.weight", r"\d+.norm.bias", r"\d+.back.bias", r"\d+.places"],
        "parameter_with_row_parallelism_patterns": [r"\d+.back.weight"],
        "parameter_with_2_sub_params_cat_dim_0": [r"\d+.gate_and_up.weight", r"\d+.gate_and_up.bias"],
    },
)


class Group:
    """The ranks that divide one layer: `ranks` of them, this one is number `rank`."""

    def __init__(self, topology: Any) -> None:
        for ranks in topology.get_axis_comm_lists("model"):
            made = distributed.new_group(ranks)
            if distributed.get_rank() in ranks:
                self.made, self.rank = made, ranks.index(distributed.get_rank())


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        distributed.all_reduce(grad, group=ctx.group.made)
        return grad, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        x = x.contiguous().clone()
        distributed.all_reduce(x, group=group.made)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(PARTS)]
        distributed.all_gather(parts, x.contiguous(), group=group.made)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.chunk(PARTS, dim=-1)[ctx.group.rank].contiguous(), None


def _random(*shape: int) -> torch.Tensor:
    """The same values on all ranks that build the same layer."""
    return torch.randn(shape) * 0.3


class Words(nn.Module):
    """This rank's rows of the embedding."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_random(PADDED, HIDDEN).chunk(PARTS)[group.rank].clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = PADDED // PARTS
        own = tokens - self.group.rank * rows
        there = (own >= 0) & (own < rows)
        found = nn.functional.embedding(own.clamp(0, rows - 1), self.weight) * there.unsqueeze(-1)
        return _Summed.apply(found, self.group)


def head(words: Words, x: torch.Tensor) -> torch.Tensor:
    """Logits of all words, from this rank's rows."""
    return _Gathered.apply(linear(_Copied.apply(x, words.group), words.weight), words.group)


class Part(nn.Module):
    """A weight and a bias under the names of a linear layer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())


class Block(nn.Module):
    """A gated block: norm, gate and up cut by rows, back cut by columns."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        gate, up, back = _random(INNER, HIDDEN), _random(INNER, HIDDEN), _random(HIDDEN, INNER)
        biases = _random(INNER), _random(INNER)
        own = [value.chunk(PARTS)[group.rank] for value in (gate, up, *biases)]
        self.norm = Part(torch.ones(HIDDEN), torch.zeros(HIDDEN))
        self.gate_and_up = Part(torch.cat(own[:2]), torch.cat(own[2:]))
        self.back = Part(back.chunk(PARTS, dim=1)[group.rank], _random(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = _Copied.apply(layer_norm(x, (HIDDEN,), self.norm.weight, self.norm.bias), self.group)
        gate, up = linear(normed, self.gate_and_up.weight, self.gate_and_up.bias).chunk(2, dim=-1)
        return x + _Summed.apply(linear(silu(gate) * up, self.back.weight), self.group) + self.back.bias


class Places(nn.Module):
    """Embeddings of positions, whole on each rank, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(_random(6, HIDDEN))
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.places * self.scale


class Column(nn.Module):
    """A linear layer cut by rows whose outputs are gathered: no pattern tells of it."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self.wide = nn.Parameter(_random(HIDDEN, HIDDEN).chunk(PARTS)[group.rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Gathered.apply(linear(_Copied.apply(x, self.group), self.wide), self.group)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(base: dict[str, Any], steps: int) -> tuple[Any, Any, Any]:
    """The engine, the optimizer and the module after some steps on 2 x 2 x 2 ranks."""
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=PARTS, num_dp=2)
    group = Group(topology)
    layers = [
        TiedLayerSpec("embedding", Words, group),
        LayerSpec(Places),
        LayerSpec(Block, group),
        LayerSpec(Block, group),
        LayerSpec(Column, group),
        TiedLayerSpec("embedding", Words, group, forward_fn=head),
    ]
    torch.manual_seed(5)
    model = PipelineModule(layers, topology=topology, loss_fn=_loss, seed_layers=True, partition_method="uniform")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    config = {**base, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(100 + engine.grid.get_data_parallel_id())

    def data() -> Any:
        while True:
            tokens = torch.randint(0, WORDS, (2, 6), generator=generator)
            yield tokens, tokens.roll(1, 1)

    batches = data()
    for _ in range(steps):
        engine.train_batch(batches)
    return engine, optimizer, model
