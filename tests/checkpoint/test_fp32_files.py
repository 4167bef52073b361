"""`convert_zero_checkpoint_to_fp32_state_dict` writes the files that were asked for, also from all ranks at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.test_deepspeed import CHECKPOINTS
from tests.support.distributed import run_ranks
from zeroshard.checkpoint.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from zeroshard.errors import UsageError

SOURCE = CHECKPOINTS / "zero3"


def expected() -> dict[str, torch.Tensor]:
    state = get_fp32_state_dict_from_zero_checkpoint(SOURCE)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def same(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    assert found.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in found.items())


def test_one_file_of_torch_is_the_default_and_tied_weights_share_memory(tmp_path: Path) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(SOURCE, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pytorch_model.bin"]
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    same(found, expected())
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


def test_parts_have_an_index_that_names_every_tensor(tmp_path: Path) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(SOURCE, tmp_path, max_shard_size=300)
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    parts = {name: torch.load(tmp_path / name, weights_only=True) for name in set(index["weight_map"].values())}
    assert len(parts) > 1
    assert {path.name for path in tmp_path.iterdir()} == {*parts, "pytorch_model.bin.index.json"}
    state = expected()
    same({name: parts[file][name] for name, file in index["weight_map"].items()}, state)
    once = {value.data_ptr(): value.nbytes for value in state.values()}
    assert index["metadata"]["total_size"] == sum(once.values())


def test_safetensors_are_written_when_asked(tmp_path: Path) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(SOURCE, tmp_path, safe_serialization=True)
    found = load_file(tmp_path / "model.safetensors")
    same(found, {name: value for name, value in expected().items() if name in found})


@pytest.mark.parametrize("safe", [False, True])
def test_all_ranks_may_call_it_at_once(tmp_path: Path, safe: bool) -> None:
    run_ranks(3, _convert, str(tmp_path / "out"), safe)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    if safe:
        assert "model.safetensors.index.json" in names
        assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]
        return
    index = json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())
    assert names == {*index["weight_map"].values(), "pytorch_model.bin.index.json"}
    for name, file in index["weight_map"].items():
        assert torch.equal(torch.load(tmp_path / "out" / file, weights_only=True)[name], expected()[name])


def _convert(rank: int, world: int, folder: str, safe: bool) -> None:
    for _ in range(3):
        convert_zero_checkpoint_to_fp32_state_dict(SOURCE, folder, 300, safe)


def test_other_files_stay_and_weights_of_another_export_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    convert_zero_checkpoint_to_fp32_state_dict(SOURCE, tmp_path)
    convert_zero_checkpoint_to_fp32_state_dict(SOURCE, tmp_path)  # the same again
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "pytorch_model.bin"}
    with pytest.raises(UsageError, match=r"pytorch_model\.bin belongs to weights of another form"):
        convert_zero_checkpoint_to_fp32_state_dict(SOURCE, tmp_path, safe_serialization=True)
