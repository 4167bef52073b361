"""`save_16bit_model` and an export of the run's checkpoint write what the model computes with, tied weights once.

A failure of rank 0 reaches all ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.checkpoint.any_checkpoint import open_checkpoint
from zeroshard.checkpoint.export.hf import export_hf
from zeroshard.engine.outside_step.gathered import full_state_dict
from zeroshard.errors import CheckpointError, UsageError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor([3, 1]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.frozen(x)).float().square().mean()


def save_all(rank: int, world_size: int, folder: Path, stage: int) -> None:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = zeroshard.initialize(model=Tied(), config=config)[0]
    engine.backward(engine(torch.arange(6).view(2, 3) + rank))
    engine.step()
    expected = full_state_dict(engine.module, master=False)
    masters = full_state_dict(engine.module)
    engine.save_checkpoint(folder / "own")
    assert engine.save_16bit_model(folder / "all") is True
    engine.save_16bit_model(folder / "all", "model.safetensors")
    engine.save_16bit_model(folder / "all", "trained.safetensors", exclude_frozen_parameters=True)
    if rank == 0:
        found = torch.load(folder / "all" / "pytorch_model.bin", weights_only=True)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert all(found[name].dtype == value.dtype for name, value in expected.items())
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
        assert found["embed.weight"].dtype == torch.bfloat16
        once = load_file(folder / "all" / "model.safetensors")
        assert once.keys() == expected.keys() - {"head.weight"}
        assert all(torch.equal(value, expected[name]) for name, value in once.items())
        trained = load_file(folder / "all" / "trained.safetensors")
        assert trained.keys() == once.keys() - {"frozen.weight", "frozen.bias"}
        assert sorted(path.name for path in (folder / "all").iterdir()) == [
            "model.safetensors",
            "pytorch_model.bin",
            "trained.safetensors",
        ]
        export_hf(open_checkpoint(folder / "own"), folder / "low")
        export_hf(open_checkpoint(folder / "own"), folder / "full", torch.float32)
        low, full = (load_file(folder / name / "model.safetensors") for name in ("low", "full"))
        assert low.keys() == full.keys() == once.keys()
        assert all(torch.equal(low[name], value) and low[name].dtype == value.dtype for name, value in once.items())
        assert all(torch.equal(full[name].to(value.dtype), value) for name, value in masters.items() if name in full)
        (folder / "file").write_text("")
    with pytest.raises(UsageError, match="no file name"):
        engine.save_16bit_model(folder, "../x")
    with pytest.raises(
        CheckpointError, match=r"can't be written" if rank == 0 else "rank 0 failed: .* can't be written"
    ):
        engine.save_16bit_model(folder / "file", "x.safetensors")
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_the_file_holds_what_the_model_computes_with(stage: int, tmp_path: Path) -> None:
    run_ranks(2, save_all, tmp_path, stage)
