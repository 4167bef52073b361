"""Builders of models whose deferred build must give the bits of the ordinary one. Each is named in the test ids."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations


def _apply_init(model: nn.Module) -> nn.Module:
    """A second initialisation over the first, as Hugging Face models do."""

    def init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()

    return model.apply(init)


def linears(width: int = 24, depth: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def post_hoc(width: int = 24, depth: int = 4) -> nn.Module:
    return _apply_init(nn.Sequential(nn.Embedding(11, width, padding_idx=3), linears(width, depth)))


def fancy_inits() -> nn.Module:
    model = linears(20, 8)
    weights = [layer.weight for layer in model.children() if isinstance(layer, nn.Linear)]
    nn.init.trunc_normal_(weights[0], std=0.02, a=-0.03, b=0.03)
    nn.init.orthogonal_(weights[1], gain=1.3)
    nn.init.kaiming_normal_(weights[2])
    nn.init.xavier_uniform_(weights[3])
    nn.init.eye_(weights[4])
    nn.init.sparse_(weights[5], sparsity=0.3)
    nn.init.constant_(weights[6], 0.25)
    with torch.no_grad():
        for weight in weights:
            weight.mul_(1 / math.sqrt(2))
        weights[7][:, 3:9] = torch.randn(20, 6)
        weights[7][5].copy_(weights[1][:, 2])
        weights[6].copy_(weights[6].t() + weights[0])
    return model


class Buffers(nn.Module):
    """Buffers computed from scratch tensors, Python data and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, 16, 2, dtype=torch.int64).float() / 16))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("position_ids", torch.arange(32).expand((1, -1)), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8, dtype=torch.bool)).view(1, 1, 8, 8))
        self.register_buffer("table", torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
        self.register_buffer("halves", torch.tensor([1, 2, 3]) / 2)
        angles = torch.outer(torch.arange(4).float(), inv_freq)
        self.register_buffer("freqs", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("conjugate", torch.polar(torch.ones_like(angles), angles).conj())
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.noise = nn.Parameter(torch.normal(0.0, 0.1, size=(5, 5)))
        self.old = nn.Parameter(torch.Tensor(3, 4))
        nn.init.uniform_(self.old)


class DropPath(nn.Module):
    """Python control flow on values: rates by `.item()` and `tolist()`, a rejection loop on a truth value."""

    def __init__(self, device: str | None) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4, device=device)]
        self.drops = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        self.sizes = torch.tensor([3, 5]).tolist()
        self.layer = nn.Linear(*self.sizes)
        with torch.no_grad():
            while (self.layer.weight.abs() > 0.3).any():
                self.layer.weight.uniform_(-0.32, 0.32)


def real_randomness() -> nn.Module:
    """Real random tensors, reseeding and private generators between deferred draws."""
    first = nn.Linear(17, 5)
    width = 4 + int(torch.randint(0, 5, (1,), device="cpu").item())
    second = nn.Linear(width, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        third = nn.Linear(6, 6)
    own = torch.Generator().manual_seed(5)
    fourth = nn.Linear(6, 6)
    nn.init.normal_(fourth.weight, generator=own)
    nn.init.trunc_normal_(fourth.bias, generator=own)
    fifth = nn.Linear(3, 3)
    real = torch.from_numpy(np.zeros((3, 3), np.float32)).normal_()
    fifth.weight.data.copy_(real)
    fifth.bias.data.mul_(torch.tensor(3.0, device="cpu"))
    return nn.ModuleList([first, second, third, fourth, fifth])


def aliases() -> nn.Module:
    """Ties, replacements, frozen parameters, one storage under two parameters, deep copies, plain attributes."""
    model = nn.Module()
    model.embed = nn.Embedding(7, 6)
    model.head = nn.Linear(6, 7)
    model.head.weight = model.embed.weight
    model.replaced = nn.Linear(6, 6)
    model.replaced.weight = nn.Parameter(model.replaced.weight.detach() * 2, requires_grad=False)
    model.swapped = nn.Linear(4, 4)
    model.swapped.weight.data = torch.eye(4) * 3
    both = torch.randn(6, 4)
    model.top, model.bottom = nn.Parameter(both[:2]), nn.Parameter(both[2:])
    copies = [copy.deepcopy(model.replaced) for _ in range(3)]
    copies[1].bias.data.add_(1)
    model.copies = nn.ModuleList(copies)
    model.plain = torch.arange(5) * 2
    return model


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(5, 6)),
        parametrizations.spectral_norm(nn.Linear(6, 7)),
        parametrizations.orthogonal(nn.Linear(7, 7)),
    )


def cast_at_the_end(width: int = 24, depth: int = 4) -> nn.Module:
    return post_hoc(width, depth).to(torch.bfloat16)


def default_dtype() -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.ModuleList([linears(), Buffers().to("cpu")])
    finally:
        torch.set_default_dtype(torch.float32)


def resized() -> nn.Module:
    model = nn.Module()
    grown = torch.zeros(2)
    grown.resize_(3, 4).fill_(2.0)
    model.grown = nn.Parameter(grown)
    model.flipped = nn.Parameter(torch.rand(3, 4).t_())
    model.columns = nn.Parameter(torch.randn(4, 3).t())
    model.columns.data.normal_()
    torch._foreach_mul_([model.grown.data, model.flipped.data], 2.0)
    return model


ZOO: dict[str, Callable[[], nn.Module]] = {
    "linears": linears,
    "post-hoc init": post_hoc,
    "fancy inits": fancy_inits,
    "embedding with padding": lambda: nn.Embedding(9, 4, padding_idx=2),
    "norms": lambda: nn.Sequential(nn.LayerNorm(5), nn.BatchNorm1d(5), nn.RMSNorm(5), nn.GroupNorm(1, 5)),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose1d(4, 4, 3), nn.Conv3d(1, 2, 2)),
    "attention": lambda: nn.MultiheadAttention(12, 3, kdim=8, vdim=6, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "encoder of deep copies": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3),
    "lstm": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True),
    "buffers": Buffers,
    "values read": lambda: DropPath(None),
    "real values read": lambda: DropPath("cpu"),
    "real randomness": real_randomness,
    "aliases": aliases,
    "parametrized": parametrized,
    "cast at the end": cast_at_the_end,
    "default dtype": default_dtype,
    "resized": resized,
}
