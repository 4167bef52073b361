"""What is imported from DeepSpeed is in our own checkpoint bit for bit; fp32 weights come out of either."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from tests.checkpoint.test_deepspeed import CASES, CHECKPOINTS, opened, truth
from zeroshard.checkpoint.any_checkpoint import open_checkpoint
from zeroshard.checkpoint.foreign.contents import Contents
from zeroshard.checkpoint.foreign_commands import register
from zeroshard.checkpoint.native import write_native
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zeroshard.errors import CheckpointError


def same(found: Contents, expected: Contents) -> None:
    assert found.parameters.keys() == expected.parameters.keys()
    for name, parameter in expected.parameters.items():
        other = found.parameters[name]
        assert (other.step, other.trainable, other.compute) == (parameter.step, parameter.trainable, parameter.compute)
        assert other.weight.dtype == parameter.weight.dtype
        assert torch.equal(other.weight.read(), parameter.weight.read())
        assert other.moments.keys() == parameter.moments.keys()
        assert all(torch.equal(other.moments[key].read(), value.read()) for key, value in parameter.moments.items())
    assert found.buffers.keys() == expected.buffers.keys()
    assert all(torch.equal(found.buffers[name].read(), value.read()) for name, value in expected.buffers.items())
    assert found.aliases == expected.aliases
    assert [group.names for group in found.groups] == [group.names for group in expected.groups]
    for group, other in zip(found.groups, expected.groups, strict=True):
        assert group.options.items() <= other.options.items()
        assert {"lr", "betas", "eps", "weight_decay"} <= group.options.keys()
    assert (
        (found.optimizer, found.scheduler_type)
        == (expected.optimizer, expected.scheduler_type)
        == ("AdamW", "WarmupLR")
    )
    assert (found.steps, found.skipped) == (expected.steps, expected.skipped)
    assert found.scheduler == expected.scheduler
    assert found.client_state == expected.client_state


@pytest.mark.parametrize("case", CASES)
def test_an_import_keeps_everything(case: str, tmp_path: Path) -> None:
    folder = write_native(opened(case), tmp_path, "imported")
    with CheckpointReader(folder) as reader:
        assert reader.verify() == []
    same(open_checkpoint(tmp_path), opened(case))
    same(open_checkpoint(tmp_path, "imported"), opened(case))
    same(open_checkpoint(folder), opened(case))


@pytest.mark.parametrize("source", ["deepspeed", "own"])
def test_fp32_weights_come_under_all_names(source: str, tmp_path: Path) -> None:
    expected = truth("zero3")
    folder = CHECKPOINTS / "zero3"
    if source == "own":
        write_native(opened("zero3"), tmp_path / "own", "imported")
        folder = tmp_path / "own"
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    lazy = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    assert state.keys() == lazy.keys()
    assert state["head.weight"] is state["embed.weight"]
    assert lazy["head.weight"] is lazy["embed.weight"]
    for name in opened("zero3").parameters:
        assert torch.equal(state[name], expected.get(f"{name}|fp32", expected[f"{name}|compute"].float()))
        assert torch.equal(lazy[name].contiguous(), state[name])
        assert state[name].dtype == lazy[name].dtype == torch.float32
    trained = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert state.keys() - trained.keys() == {"frozen.weight", "frozen.bias"}
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out", max_shard_size=300, safe_serialization=True)
    written = {
        name: value for file in (tmp_path / "out").glob("*.safetensors") for name, value in load_file(file).items()
    }
    assert written.keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(value, state[name]) for name, value in written.items())
    if source == "deepspeed":
        command = [sys.executable, "-m", "zeroshard.checkpoint.zero_to_fp32", str(folder), str(tmp_path / "script")]
        subprocess.run([*command, "--safe_serialization"], check=True, capture_output=True)
        assert load_file(tmp_path / "script" / "model.safetensors").keys() == written.keys()


class Model(nn.Module):
    """The model of the fixtures."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 9)
        self.frozen = nn.Linear(9, 5)
        self.second = nn.Linear(5, width, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(7))


def test_fp32_weights_go_into_a_plain_model_or_nothing_changes() -> None:
    model = load_state_dict_from_zero_checkpoint(Model(), CHECKPOINTS / "zero3")
    expected = get_fp32_state_dict_from_zero_checkpoint(CHECKPOINTS / "zero3")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    wide = Model(width=8)
    before = {name: value.clone() for name, value in wide.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"embed.weight.*\[13, 8\]"):
        load_state_dict_from_zero_checkpoint(wide, CHECKPOINTS / "zero3")
    assert all(torch.equal(value, before[name]) for name, value in wide.state_dict().items())


def test_the_commands_say_what_they_did(tmp_path: Path) -> None:
    app = typer.Typer()
    register(app)
    source, runner = str(CHECKPOINTS / "zero2"), CliRunner()
    done = runner.invoke(app, ["import", source, str(tmp_path / "own"), "--json"], catch_exceptions=False)
    said = json.loads(done.stdout)
    assert said["folder"] == str(tmp_path / "own" / "global_step3")
    assert said["aliases"] == {"head.weight": "embed.weight"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32"}))
    command = [
        "export",
        str(tmp_path / "own"),
        str(tmp_path / "hf"),
        "--json",
        "--config",
        str(tmp_path / "config.json"),
    ]
    said = json.loads(runner.invoke(app, command, catch_exceptions=False).stdout)
    assert said["files"] == ["model.safetensors"]
    assert said["config"] is True
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    done = runner.invoke(app, ["export", source, str(tmp_path / "dcp"), "--format", "dcp"], catch_exceptions=False)
    assert str(tmp_path / "dcp") in done.stdout
    assert open_checkpoint(tmp_path / "dcp").steps == 3
    for directory in (tmp_path / "missing", tmp_path / "hf"):
        with pytest.raises(CheckpointError, match=str(directory)):
            runner.invoke(app, ["export", str(directory), str(tmp_path / "x")], catch_exceptions=False)
