"""`zeroshard checkpoint` says what is there, finds damage, and removes what is old."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import Batch, Task, square_loss
from tests.support.saved import save_tensors
from tests.support.training import Setting, adamw, build, sgd, shard_task
from tests.support.zoo import Stack
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


def test_ls_shows_the_steps_of_an_engine_and_of_an_optimizer_that_was_saved_without_one(tmp_path: Path) -> None:
    run_ranks(1, _saved_steps, tmp_path)
    rows = json.loads(_run("ls", str(tmp_path), "--json"))
    assert {row["tag"]: row["step"] for row in rows} == {"by_sgd": 1, "by_adamw": 2, "by_engine": 3}


def _saved_steps(rank: int, world: int, folder: Path) -> None:
    task = Task(Stack, square_loss)
    for steps, optimizer in enumerate((sgd, adamw), 1):
        model, sharded = shard_task(task, Setting(optimizer=optimizer))
        for step in range(steps):
            task.loss(model, Batch(step, 0, rank)).backward()
            sharded.step()
            sharded.zero_grad()
        zeroshard.save(model, folder, f"by_{optimizer.__name__}")
        zeroshard.close(model)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = zeroshard.initialize(model=build(task), config=config)
    for step in range(3):
        engine.backward(task.loss(engine, Batch(step, 0, rank)))
        engine.step()
    engine.save_checkpoint(folder, "by_engine")
    engine.destroy()


def test_ls_warns_of_a_latest_that_names_nothing(base: Path) -> None:
    (base / "latest").write_text("step9")
    for options in ([], ["--json"]):
        result = CliRunner().invoke(app, ["ls", str(base), *options], env={"NO_COLOR": "1"})
        assert "latest names 'step9', which is no checkpoint there; a load takes step3" in result.stderr
        assert "step9" not in result.stdout


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


def test_verify_says_each_damage_on_a_line_of_its_own_however_long_it_is(tmp_path: Path) -> None:
    base = tmp_path / ("long" * 40)
    save_tensors(base, "step0", {"w": torch.ones(7, 3)}, 1, {})
    assert _run("verify", str(base)).count("\n") == 1
    file = base / "step0" / "model-00000-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert re.fullmatch(
        r".* is damaged: tensor 'w' does not match its checksum .*\n", _run("verify", str(base), status=1)
    )


def test_prune_removes_the_oldest_and_only_says_so_on_a_dry_run(base: Path) -> None:
    assert json.loads(_run("prune", str(base), "--keep", "3", "--dry-run", "--json"))["found"] == ["step0"]
    assert (base / "step0").exists()
    assert "removed step0" in _run("prune", str(base), "--keep", "3")
    assert json.loads(_run("prune", str(base), "--keep", "1", "--json"))["removed"] == ["step1", "step2"]
    assert "nothing to remove" in _run("prune", str(base), "--keep", "1")


@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"], ["verify"], ["prune", "--keep", "1"]])
def test_the_folder_of_several_runs_or_of_none_is_answered_with_where_checkpoints_are(
    base: Path, command: list[str]
) -> None:
    run = base / "runs" / "first"
    run.mkdir(parents=True)
    (base / "step0").rename(run / "step0")
    (base / "empty").mkdir()
    cases = [
        (run.parent, f"one level deeper: give one of {run}"),
        (base / "empty", "holds no finished checkpoint"),
        (run / "step0" / MANIFEST, "is a file"),
        (base / "nothing", "is not there"),
    ]
    if command[0] == "prune":
        cases.append((run / "step0", f"one checkpoint itself; give the directory that it is in, {run}"))
    for path, said in cases:
        with pytest.raises(CheckpointError, match=re.escape(said)):
            CliRunner().invoke(app, [*command, str(path)], catch_exceptions=False)


def test_square_brackets_in_paths_and_names_are_shown(tmp_path: Path) -> None:
    base = tmp_path / "run[bold]"
    folder = save_tensors(base, "one", {"w[red]": torch.zeros(2)}, 1, {"tied[a]": "w[red]"})
    assert "run[bold]" in _run("ls", str(base))
    assert f"{folder} is whole" in _run("verify", str(base)).replace("\n", "")
    listed = _run("ls", str(folder))
    assert all(text in listed for text in ("run[bold]", "w[red]", "tied[a]", "same as w[red]"))
    (folder / "model-00000-0.safetensors").unlink()
    assert "run[bold]" in _run("ls", str(base)).split("state", 1)[1].replace("\n", "")
