"""The log of a directory of checkpoints: every act is in it, and no line can be changed or taken out unseen."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.saved import save_tensors
from zeroshard.checkpoint import audit_cli, cli, directory
from zeroshard.checkpoint.audit import HEAD, LOG, Act, begin_log, check_load, read_log, record
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.errors import CheckpointError

EDITS = int(os.environ.get("ZEROSHARD_EDITS", "150"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory with a log of five saves."""
    begin_log(tmp_path)
    for number in range(5):
        save_tensors(tmp_path, f"step{number}", {"w": torch.full((3,), number)}, 1)
        record(tmp_path, Act.SAVE, f"step{number}")
    return tmp_path


def _run(app: object, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"NO_COLOR": "1", "COLUMNS": "200"})  # type: ignore[arg-type]
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout


def test_an_untouched_log_is_whole_and_says_who_did_what(base: Path) -> None:
    found = json.loads(_run(audit_cli.app, "ls", str(base), "--json"))
    assert [(act["n"], act["act"], act["tag"]) for act in found["acts"]] == [
        (number + 1, "save", f"step{number}") for number in range(5)
    ]
    assert all("@" in act["who"] for act in found["acts"])
    assert "step3" in _run(audit_cli.app, "ls", str(base))
    whole = json.loads(_run(audit_cli.app, "verify", str(base), "--json"))
    assert whole == {"lines": 5, "head": found["acts"][-1]["hash"], "whole": True, "problems": []}


def _edits(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    place = chance.randrange(len(lines))
    how = chance.randrange(6)
    if how == 0:
        changed = bytearray(data)
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return bytes(changed)
    if how == 1:
        return data[: chance.randrange(len(data))]
    if how == 2:
        del lines[place]
    elif how == 3:
        lines.insert(chance.randrange(len(lines) + 1), lines[place])
    elif how == 4:
        other = (place + 1) % len(lines)
        lines[place], lines[other] = lines[other], lines[place]
    else:  # an act that is told otherwise, with a hash that fits itself
        value = json.loads(lines[place])
        value["who"] = "nobody@nowhere"
        lines[place] = json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    return b"".join(lines)


def test_every_random_edit_of_the_log_is_found(base: Path) -> None:
    chance = random.Random(int(os.environ.get("ZEROSHARD_EDITS_SEED", "3")))
    written = (base / LOG).read_bytes()
    for number in range(EDITS):
        edited = _edits(written, chance)
        (base / LOG).write_bytes(edited)
        found = read_log(base)
        assert found.problem is not None or edited == written, f"edit {number}: {edited!r}"
    (base / LOG).write_bytes(written)
    assert read_log(base).problem is None


def test_a_log_that_was_begun_anew_lacks_the_hash_that_was_kept_elsewhere(base: Path) -> None:
    head = read_log(base).entries[2].hash
    assert "is as it was written" in _run(audit_cli.app, "verify", str(base), "--head", head)
    (base / LOG).unlink()
    (base / HEAD).unlink()
    begin_log(base)
    for number in range(5):
        record(base, Act.SAVE, f"step{number}")
    assert "begun anew" in _run(audit_cli.app, "verify", str(base), "--head", head, status=1)


def test_a_kill_between_two_writes_is_no_edit(base: Path) -> None:
    log, head = (base / LOG).read_bytes(), (base / HEAD).read_bytes()
    record(base, Act.LOAD, "step4")
    longer = (base / LOG).read_bytes()
    (base / HEAD).write_bytes(head)  # the line was written, what says so was not
    assert read_log(base).problem is None
    (base / LOG).write_bytes(longer[: len(log) + 40])  # a part of the line was
    assert read_log(base).problem is None
    record(base, Act.LOAD, "step3")
    assert [entry.tag for entry in read_log(base).entries][-2:] == ["step4", "step3"]
    assert read_log(base).problem is None


def test_nothing_is_added_to_a_log_that_was_changed(base: Path) -> None:
    edited = (base / LOG).read_bytes().replace(b"step1", b"step7")
    (base / LOG).write_bytes(edited)
    with pytest.raises(CheckpointError, match="line 2 is not what was written there"):
        record(base, Act.LOAD, "step4")
    with pytest.raises(CheckpointError, match="nothing is loaded from here"):
        check_load(base, base / "step4")
    assert (base / LOG).read_bytes() == edited


def test_a_log_that_was_removed_is_missed(base: Path) -> None:
    (base / LOG).unlink()
    with pytest.raises(CheckpointError, match=r"audit\.jsonl is not there, though .*audit\.head is.*nothing is added"):
        record(base, Act.LOAD, "step4")
    with pytest.raises(CheckpointError, match="the log was removed; nothing is loaded from here"):
        check_load(base, base / "step4")
    begin_log(base)
    assert not (base / LOG).exists()
    assert "the log was removed" in _run(audit_cli.app, "verify", str(base), status=1)


def test_an_older_checkpoint_that_was_put_back_is_refused(base: Path) -> None:
    old = shutil.copytree(base / "step4", base.parent / "old")
    save_tensors(base, "step4", {"w": torch.ones(3)}, 1)
    record(base, Act.SAVE, "step4")
    check_load(base, base / "step4")
    shutil.rmtree(base / "step4")
    old.rename(base / "step4")
    with pytest.raises(CheckpointError, match=r"step4/checkpoint.json is not the one that .* wrote.*line 6"):
        check_load(base, base / "step4")
    assert "an older one was put back" in _run(audit_cli.app, "verify", str(base), status=1)
    (base / "step4").rename(base / "step9")
    with pytest.raises(CheckpointError, match=r"step9 is not in .*nobody saved it here"):
        check_load(base, base / "step9")


def test_a_held_checkpoint_is_neither_pruned_nor_replaced(base: Path) -> None:
    _run(cli.app, "hold", str(base / "step1"), "--why", "case 12")
    assert json.loads((base / "step1" / directory.HOLD).read_text())["why"] == "case 12"
    with pytest.raises(CheckpointError, match="is held already"):
        _run_raising("hold", str(base / "step1"), "--why", "again")
    assert json.loads(_run(cli.app, "prune", str(base), "--keep", "1", "--json"))["removed"] == [
        "step0",
        "step2",
        "step3",
    ]
    with pytest.raises(CheckpointError, match=r"step1 is held .*checkpoint release"):
        save_tensors(base, "step1", {"w": torch.zeros(3)}, 1)
    assert [row["held"] for row in json.loads(_run(cli.app, "ls", str(base), "--json"))] == [True, False]
    _run(cli.app, "release", str(base / "step1"))
    assert json.loads(_run(cli.app, "prune", str(base), "--keep", "1", "--json"))["removed"] == ["step1"]
    acts = [(entry.act, entry.tag) for entry in read_log(base).entries[5:]]
    deleted = [("delete", f"step{number}") for number in (0, 2, 3)]
    assert acts == [("hold", "step1"), *deleted, ("release", "step1"), ("delete", "step1")]
    assert read_log(base).problem is None


def _run_raising(*arguments: str) -> None:
    CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)


def _trains(rank: int, world: int, base: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
        "checkpoint": {"audit": True, "keep": 1},
    }
    engine, *_ = zeroshard.initialize(model=nn.Linear(7, 7), config=config)
    engine.save_checkpoint(str(base), "one")
    engine.save_checkpoint(str(base), "two")
    engine.load_checkpoint(str(base))
    table = base / "two" / MANIFEST
    if rank == 0:
        text = table.read_text()
        table.write_text(text.replace('"order"', '"order" '))  # the same values in other bytes
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    with pytest.raises(CheckpointError, match="was changed, or an older one was put back"):
        engine.load_checkpoint(str(base))
    assert all(map(torch.equal, before, engine.module.parameters()))


def test_a_run_logs_its_saves_and_loads_and_loads_nothing_else(tmp_path: Path) -> None:
    run_ranks(2, _trains, tmp_path)
    assert [(entry.act, entry.tag) for entry in read_log(tmp_path).entries] == [
        ("save", "one"),
        ("save", "two"),
        ("delete", "one"),
        ("load", "two"),
    ]
