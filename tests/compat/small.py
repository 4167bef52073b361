"""A small model, started through `deepspeed.initialize`, for the tests of what libraries expect of the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

deepspeed = pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.scale, torch.Tensor)
        return x + torch.tanh(self.inner(x)) * self.scale.to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def small_net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + rank))


def start(model: nn.Module, config: dict[str, Any] | None = None, **options: Any) -> Any:
    return deepspeed.initialize(
        model=model, config_params={**CONFIG, "optimizer": ADAMW} if config is None else config, **options
    )


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same_values(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def train(engine: Any, rank: int, steps: int, accumulation: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        for micro in range(accumulation):
            loss = engine(batch(rank, step * accumulation + micro)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses
