"""Checkpoints that FSDP2 code saves open exactly and go on here; a plain DCP export goes into an FSDP2 model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.checkpoint.export.dcp import export_dcp
from zeroshard.checkpoint.foreign.dcp import METADATA, open_dcp
from zeroshard.checkpoint.native import open_native, write_native
from zeroshard.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor([3, 1]))
        self.register_buffer("mean", torch.linspace(0, 1, 7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.mean
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    model.mean += seed
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer_of(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def go_on_here(rank: int, folder: Path) -> list[float]:
    """The losses of zeroshard's stage 3 from the imported checkpoint."""
    torch.manual_seed(2)
    model = Tied()
    model.mean += 5
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3}}
    engine = zeroshard.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
    engine.load_checkpoint(folder)
    generator = torch.Generator().manual_seed(10 + rank)
    losses = []
    for _ in range(2):
        loss = engine(torch.randint(0, 13, (2, 5), generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: int = 2) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(torch.randint(0, 13, (2, 5), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def both_ways(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = build(0)
    train(model, optimizer, seed=rank)
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim, "train": {"step": 7}}, checkpoint_id=folder / "nested")
    flat, flat_optim = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    titan = {**flat, "optimizer": flat_optim, "train_state": {"step": torch.tensor(7)}}
    dcp.save(titan, checkpoint_id=folder / "titan")
    weights = whole(state)
    moments = {name: whole(values) for name, values in optim["state"].items()}
    for kind in ("nested", "titan"):
        contents = open_dcp(folder / kind)
        assert contents.aliases == {"head.weight": "embed.weight"}
        assert {*contents.parameters, *contents.buffers, "head.weight"} == set(weights)
        assert torch.equal(contents.buffers["seen"].read(), weights["seen"])
        for name, parameter in contents.parameters.items():
            assert torch.equal(parameter.weight.read(), weights[name])
            if name == "mean":  # a buffer, which DCP does not tell from a frozen parameter
                assert not parameter.trainable
                continue
            assert parameter.step == 2
            assert sorted(parameter.moments) == ["exp_avg", "exp_avg_sq"]
            for key, moment in parameter.moments.items():
                assert torch.equal(moment.read(), moments[name][key])
        assert sorted(group.options["weight_decay"] for group in contents.groups) == [0.0, 0.1]
        assert {frozenset(group.names) for group in contents.groups} == {
            frozenset(("embed.weight", "blocks.0.weight", "blocks.1.weight")),
            frozenset(("blocks.0.bias", "blocks.1.bias")),
        }
        assert all(group.options["betas"] == [0.9, 0.95] for group in contents.groups)
        assert contents.left_out == ()
        assert contents.steps == (7 if kind == "titan" else 2)
    if rank == 0:
        own = write_native(open_dcp(folder / "titan"), folder / "own", "imported")
        export_dcp(open_native(own), folder / "exported")
    torch.distributed.barrier()
    again, optimizer_again = build(1)
    state, optim = get_state_dict(again, optimizer_again)
    dcp.load({"model": state, "optim": optim}, checkpoint_id=folder / "exported")
    set_state_dict(again, optimizer_again, model_state_dict=state, optim_state_dict=optim)
    expected = train(model, optimizer, seed=10 + rank)
    assert train(again, optimizer_again, seed=10 + rank) == expected
    assert go_on_here(rank, folder / "own") == pytest.approx(expected, rel=1e-6)


def test_fsdp2_checkpoints_open_exactly_and_exports_go_back(tmp_path: Path) -> None:
    run_ranks(2, both_ways, tmp_path)
    metadata = tmp_path / "nested" / METADATA
    data = metadata.read_bytes()
    metadata.write_bytes(data.replace(b"__0_0.distcp", b"/etc/passwd\0"))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        open_dcp(tmp_path / "nested")
    metadata.write_bytes(data.replace(b"__0_0.distcp", b"../../x.what"))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        open_dcp(tmp_path / "nested")
    metadata.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        open_dcp(tmp_path / "nested")
    metadata.write_bytes(data)
    part = tmp_path / "nested" / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="beyond its end"):
        open_dcp(tmp_path / "nested")
    part.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        open_dcp(tmp_path / "nested")
