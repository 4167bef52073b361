"""`zeroshard checkpoint` says what is there, finds damage, and removes what is old."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.support.saved import save_tensors
from zeroshard.checkpoint.cli import app
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.errors import CheckpointError


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for number in range(4):
        save_tensors(
            tmp_path, f"step{number}", {"w": torch.full((7, 3), number), "b": torch.zeros(2)}, 2, {"tied": "w"}
        )
    return tmp_path


def _run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"NO_COLOR": "1", "COLUMNS": "100"})
    assert result.exit_code == status, (result.output, result.exception)
    assert "\x1b" not in result.stdout
    return result.stdout


def test_ls_lists_checkpoints_and_tensors(base: Path) -> None:
    rows = json.loads(_run("ls", str(base), "--json"))
    assert [(row["tag"], row["ranks"], row["tensors"], row["bytes"]) for row in rows] == [
        (f"step{number}", 2, 2, 7 * 3 * 8 + 2 * 4) for number in range(4)
    ]
    assert "step3" in _run("ls", str(base))
    found = json.loads(_run("ls", str(base / "step1"), "--json"))
    assert [row["name"] for row in found["tensors"]] == ["w", "b"]
    assert found["aliases"] == {"tied": "w"}
    assert "same as w" in _run("ls", str(base), "--tensors")


def test_verify_finds_damage_and_ends_with_status_1(base: Path) -> None:
    assert json.loads(_run("verify", str(base), "--json"))["whole"] is True
    assert "is whole" in _run("verify", str(base / "step0"))
    file = base / "step3" / "model-00001-0.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = json.loads(_run("verify", str(base), "--json", status=1))
    assert found["whole"] is False
    assert str(file) in found["problems"][0]
    file.unlink()
    assert "missing" in _run("verify", str(base), status=1)


def test_prune_removes_the_oldest_and_only_says_so_on_a_dry_run(base: Path) -> None:
    assert json.loads(_run("prune", str(base), "--keep", "3", "--dry-run", "--json"))["found"] == ["step0"]
    assert (base / "step0").exists()
    assert "removed step0" in _run("prune", str(base), "--keep", "3")
    assert json.loads(_run("prune", str(base), "--keep", "1", "--json"))["removed"] == ["step1", "step2"]
    assert "nothing to remove" in _run("prune", str(base), "--keep", "1")


def test_a_directory_without_checkpoints_is_an_error_of_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["ls", str(tmp_path)])
    assert isinstance(result.exception, CheckpointError)


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_the_folder_of_several_runs_is_answered_with_where_checkpoints_are(base: Path, command: str) -> None:
    run = base / "runs" / "first"
    run.mkdir(parents=True)
    (base / "step0").rename(run / "step0")
    with pytest.raises(CheckpointError, match="one level deeper") as raised:
        CliRunner().invoke(app, [command, str(run.parent)], catch_exceptions=False)
    assert str(run) in str(raised.value)
    for path, said in ((run / "step0" / MANIFEST, "is a file"), (base / "nothing", "is not there")):
        with pytest.raises(CheckpointError, match=said):
            CliRunner().invoke(app, [command, str(path)], catch_exceptions=False)
