"""A model with adapters, as peft builds it, goes through a checkpoint: whole, and without its frozen base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.checkpoint.manifest import TensorKind
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.errors import CheckpointError


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained product of two thin ones, under peft's names."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        back = nn.Linear(rank, base.out_features, bias=False)
        self.lora_B = nn.ModuleDict({"default": back})
        self.lora_embedding_A = nn.ParameterDict({})  # peft makes it for every layer; nothing is in it
        nn.init.zeros_(back.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Trained(nn.Module):
    """`modules_to_save`: the frozen original, and a copy that is trained in its place."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.original_module = original.requires_grad_(False)
        copy = nn.Linear(original.in_features, original.out_features)
        copy.load_state_dict(original.state_dict())
        self.modules_to_save = nn.ModuleDict({"default": copy})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.modules_to_save["default"](x)


class Adapted(nn.Module):
    def __init__(self, base_seed: int, adapter_seed: int) -> None:
        super().__init__()
        torch.manual_seed(base_seed)
        self.embed = nn.Embedding(13, 8).requires_grad_(False)
        layers = [nn.Linear(8, 8) for _ in range(3)]
        head = nn.Linear(8, 13)
        torch.manual_seed(adapter_seed)
        self.blocks = nn.ModuleList(LoraLinear(layer) for layer in layers)
        self.head = Trained(head)
        self.seen = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        h = self.embed(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(h)


def _start(stage: int, base_seed: int = 1, adapter_seed: int = 2) -> Any:
    model = Adapted(base_seed, adapter_seed)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return zeroshard.initialize(model=model, model_parameters=trained, config=config)[0]


def _losses(engine: Any, steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randint(0, 13, (4,), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = nn.functional.cross_entropy(engine(x).float(), x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def _round_trip(rank: int, world: int, directory: str) -> None:
    engine = _start(3)
    _losses(engine, range(3), rank)
    engine.save_checkpoint(directory, "whole")
    engine.save_checkpoint(directory, "small", exclude_frozen_parameters=True)
    expected = _losses(engine, range(3, 6), rank)
    engine.destroy()
    for stage, tag, base_seed in ((3, "whole", 7), (1, "small", 1)):
        other = _start(stage, base_seed, adapter_seed=9)
        other.load_checkpoint(directory, tag)
        assert int(other.module.seen) == 3
        assert _losses(other, range(3, 6), rank) == expected, (stage, tag)
        other.destroy()


def test_adapters_and_modules_to_save_go_on_bit_for_bit_with_or_without_the_frozen_base(tmp_path: Path) -> None:
    run_ranks(2, _round_trip, str(tmp_path))
    with CheckpointReader(tmp_path / "whole") as whole, CheckpointReader(tmp_path / "small") as small:
        frozen = {name for name in whole.names(TensorKind.PARAMETER) if not whole.tensor(name).info.trainable}
        assert {"blocks.0.base_layer.weight", "head.original_module.bias", "embed.weight"} <= frozen
        assert set(small.names(TensorKind.PARAMETER)) == set(whole.names(TensorKind.PARAMETER)) - frozen
        moments = {info.of for info in (whole.tensor(name).info for name in whole.names()) if info.kind.of_optimizer}
        assert not moments & frozen


def test_a_base_that_was_left_out_is_missed_where_it_is_trained(tmp_path: Path) -> None:
    engine = _start(1)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    engine.destroy()
    model = Adapted(1, 2).requires_grad_(True)
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
    other = zeroshard.initialize(model=model, config=config)[0]
    with pytest.raises(CheckpointError, match=r"'embed.weight' is missing"):
        other.load_checkpoint(tmp_path)
    other.destroy()
