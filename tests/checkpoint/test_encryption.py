"""Encrypted checkpoints: nothing of them can be read without the key, and nothing can be changed without an error."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.installed import need
from tests.support.saved import save_tensors
from zeroshard.checkpoint import jsonfile
from zeroshard.checkpoint.cli import app
from zeroshard.checkpoint.keys import ENVIRONMENT, LocalKey, key_from, new_key_file
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.errors import CheckpointError, ConfigError, ZeroShardWarning

need("cryptography")

EDITS = int(os.environ.get("ZEROSHARD_EDITS", "150"))
SECRET = "names-of-customers"
KEY = LocalKey(bytes(range(32)))
OTHER = LocalKey(bytes(32))
TENSORS = {
    "secret.weight": torch.arange(3000.0).view(60, 50),
    "wide": torch.arange(2.0, 700_000.0),  # more than one chunk for each of two ranks
    "state.wide.exp_avg": torch.full((699_998,), 0.25),
    "empty": torch.empty(0, 3),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_tensors(tmp_path / "checkpoints", "step1", TENSORS, 2, {"tied": "wide"}, service=KEY)


def _problem(folder: Path, service: LocalKey = KEY) -> str | None:
    """What a reader says is wrong with a checkpoint when it reads all of it."""
    try:
        with CheckpointReader(folder, service) as reader:
            problems = reader.verify()
            for name, tensor in TENSORS.items():
                assert torch.equal(reader.tensor(name).read(), tensor) or problems, name
            return problems[0] if problems else None
    except CheckpointError as error:
        return str(error)


def test_what_was_written_is_read_in_any_part(saved: Path) -> None:
    chance = random.Random(1)
    with CheckpointReader(saved, KEY) as reader:
        assert reader.verify() == []
        assert reader.state == {"step": 7}
        for name in ("wide", "tied"):
            for _ in range(20):
                low, high = sorted(chance.sample(range(699_999), 2))
                assert torch.equal(reader.tensor(name).read_flat(low, high), TENSORS["wide"][low:high])
        assert torch.equal(
            reader.tensor("secret.weight").read_rectangle((3, 7), (20, 11)), TENSORS["secret.weight"][3:23, 7:18]
        )


def _plain(data: bytes) -> list[bytes]:
    values = (tensor.numpy().tobytes()[at : at + 16] for tensor in TENSORS.values() for at in (0, 4096, 8192))
    words = (b"secret", b"exp_avg", b"wide", b"tied", b"dtype", b"rank_state")
    return [each for each in (*words, *(value for value in values if len(value) == 16)) if each in data]


def _blocks(file: Path) -> set[bytes]:
    data = file.read_bytes()
    return {data[at : at + 64] for at in range(0, len(data), 64)}


def test_no_byte_of_tensors_names_or_state_is_on_the_disk(saved: Path, tmp_path: Path) -> None:
    clear = save_tensors(tmp_path / "clear", "step1", TENSORS, 2)
    for folder, found in ((saved, False), (clear, True)):
        data = b"".join(file.read_bytes() for file in folder.iterdir())
        assert bool(_plain(data)) == found
    again = save_tensors(tmp_path / "again", "step1", TENSORS, 2, service=KEY)
    for file in saved.glob("*.safetensors"):  # equal tensors are not seen to be equal
        assert not _blocks(file) & _blocks(again / file.name)


def test_the_table_of_a_rank_is_encrypted_while_the_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    unlink = Path.unlink

    def look(file: Path, missing_ok: bool = False) -> None:
        if file.name.startswith("rank-"):
            seen.append(file.read_bytes())
        unlink(file, missing_ok)

    monkeypatch.setattr(Path, "unlink", look)
    save_tensors(tmp_path, "step1", TENSORS, 2, service=KEY)
    assert len(seen) == 2
    assert [_plain(data) for data in seen] == [[], []]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _flip(folder: Path, chance: random.Random) -> None:
    file = chance.choice(_files(folder))
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def _cut(folder: Path, chance: random.Random) -> None:
    file = chance.choice(_files(folder))
    data = file.read_bytes()
    file.write_bytes(data[: chance.choice([0, chance.randrange(len(data)), len(data) - 16, len(data) // 2])])


def _swap_chunks(folder: Path, chance: random.Random) -> None:
    file = max(_files(folder), key=lambda each: each.stat().st_size)
    data, size = bytearray(file.read_bytes()), (1 << 20) + 16
    data[:size], data[size : 2 * size] = data[size : 2 * size], data[:size]
    file.write_bytes(data)


def _swap_files(folder: Path, chance: random.Random) -> None:
    first, second = chance.sample(_files(folder), 2)
    third = folder / "aside"
    first.rename(third)
    second.rename(first)
    third.rename(second)


def _from_another(folder: Path, chance: random.Random) -> None:
    """A file of a checkpoint of the same tensors under the same key."""
    another = save_tensors(folder.parent / "another", "step1", TENSORS, 2, {"tied": "wide"}, service=KEY)
    file = chance.choice([each for each in _files(another) if each.name != MANIFEST])
    shutil.copyfile(file, folder / file.name)


def _later_order(folder: Path, chance: random.Random) -> None:
    """An old checkpoint that is to pass for the newest."""
    content = json.loads((folder / MANIFEST).read_text())
    content["order"] += 1 + chance.randrange(1000)
    del content["checksum"]
    (folder / MANIFEST).write_bytes(jsonfile.encode(content))


@pytest.mark.parametrize("edit", [_swap_chunks, _swap_files, _from_another, _later_order])
def test_what_was_changed_on_the_disk_is_named(saved: Path, edit: Callable[[Path, random.Random], None]) -> None:
    edit(saved, random.Random(5))
    problem = _problem(saved)
    assert problem is not None
    assert str(saved) in problem


def test_every_random_edit_is_found(saved: Path, tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("ZEROSHARD_EDITS_SEED", "3")))
    small = {name: tensor for name, tensor in TENSORS.items() if tensor.numel() < 5000}
    original = save_tensors(tmp_path / "small", "step1", small, 2, service=KEY)
    for number in range(EDITS):
        folder = shutil.copytree(original, tmp_path / "edited")
        chance.choice([_flip, _flip, _cut, _swap_files])(folder, chance)
        changed = {file.name: file.read_bytes() for file in _files(folder)}
        if changed == {file.name: file.read_bytes() for file in _files(original)}:
            continue  # cut at its end
        try:
            with CheckpointReader(folder, KEY) as reader:
                problems = reader.verify()
        except CheckpointError as error:
            problems = [str(error)]
        assert problems, f"edit {number} was not found"
        assert str(folder) in problems[0]
        shutil.rmtree(folder)


def test_without_the_key_or_with_another_one_a_message_says_which_is_wanted(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(CheckpointError, match=rf"is encrypted, with key {KEY.id}.*checkpoint.encryption_key"):
        CheckpointReader(saved)
    with pytest.raises(
        CheckpointError, match=rf"encrypted with key {KEY.id}, and the key that was given is {OTHER.id}"
    ):
        CheckpointReader(saved, OTHER)
    monkeypatch.setenv("HERE", KEY.secret.hex())
    monkeypatch.setenv(ENVIRONMENT, "env:HERE")
    with CheckpointReader(saved) as reader:
        assert reader.verify() == []


def test_keys_are_read_from_files_variables_and_programs(tmp_path: Path) -> None:
    file = tmp_path / "key"
    key = new_key_file(file)
    assert key_from(f"file:{file}") == key
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    assert key_from("env:KEY", {"KEY": text}) == key
    assert key_from(f"command:cat {file}") == key
    raw = tmp_path / "raw"
    raw.write_bytes(key.secret)
    raw.chmod(0o400)
    assert key_from(f"file:{raw}") == key
    with pytest.raises(CheckpointError, match="can't be written as a new key: File exists"):
        new_key_file(file)
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("file:{0}/none", "can't be read: No such file"),
        ("file:{0}/open", "can be read or changed by other users .mode 644.; chmod 600"),
        ("file:{0}/short", "32 bytes are wanted"),
        ("file:{0}", "is no plain file"),
        ("env:NOT_THERE", "there is no such variable"),
        ("command:false", "ended with status 1: it printed no error"),
        ("command:not-there-at-all", "can't be run: No such file"),
        ("command:'", "No closing quotation"),
        ("0123456789abcdef" * 4, "of 64 characters names no place: give file:PATH"),
        ("", "is empty: give file:PATH"),
    ],
)
def test_a_key_that_can_not_be_had_is_an_error_that_shows_none_of_it(tmp_path: Path, reference: str, told: str) -> None:
    for name, mode, text in (("open", 0o644, "ab" * 32), ("short", 0o600, "5ecret")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    with pytest.raises(CheckpointError, match=told) as caught:
        key_from(reference.format(tmp_path))
    assert not {part for part in ("abab", "5ecret", "0123") if part in str(caught.value)}
    assert "0001" not in repr(KEY)


def _run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"NO_COLOR": "1", "COLUMNS": "100"})
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout


def test_another_key_takes_the_place_of_the_old_one_and_no_tensor_is_written_again(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear = save_tensors(saved.parent, "plain", TENSORS, 1)
    before = {file.name: file.stat().st_mtime_ns for file in _files(saved) if file.name != MANIFEST}
    new = json.loads(_run("new-key", str(tmp_path / "new"), "--json"))["key"]
    monkeypatch.setenv("OLD", KEY.secret.hex())
    call = ("rekey", str(saved.parent), "--key", "env:OLD", "--new-key", f"file:{tmp_path / 'new'}", "--json")
    for _ in range(2):  # the second time there is nothing to do
        assert json.loads(_run(*call)) == {"key": new, "rekeyed": ["step1"], "in the clear": ["plain"]}
    assert {file.name: file.stat().st_mtime_ns for file in _files(saved) if file.name != MANIFEST} == before
    assert _problem(saved) == (
        f"{saved / MANIFEST} was encrypted with key {new}, and the key that was given is {KEY.id}"
    )
    assert _problem(saved, key_from(f"file:{tmp_path / 'new'}")) is None
    monkeypatch.setenv(ENVIRONMENT, f"file:{tmp_path / 'new'}")
    assert "is whole" in _run("verify", str(saved))
    assert "secret.weight" in _run("ls", str(saved))
    assert _problem(clear) is None
    with pytest.raises(CheckpointError, match="encrypted with key"):
        CliRunner().invoke(app, [*call[:-2], "env:OLD"], catch_exceptions=False)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _engine(stage: int, checkpoint: dict[str, object]) -> zeroshard.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "checkpoint": checkpoint,
    }
    engine, *_ = zeroshard.initialize(model=_Net(), config=config)
    return engine


def _step(engine: zeroshard.Engine, step: int) -> float:
    torch.manual_seed(step)
    loss = engine(torch.randn(2, 7)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def _saves(rank: int, world: int, base: Path, key: str) -> list[float]:
    engine = _engine(3, {"encryption_key": key, "async": True})
    for step in range(2):
        _step(engine, step)
    engine.save_checkpoint(str(base), "two", client_state={"note": SECRET})
    engine.wait_for_checkpoint()
    return [_step(engine, step) for step in range(2, 4)]


def _goes_on(rank: int, world: int, base: Path, key: str) -> list[float]:
    os.environ.pop(ENVIRONMENT, None)
    engine = _engine(1, {})
    with pytest.raises(CheckpointError, match="is encrypted, with key"):
        engine.load_checkpoint(str(base))
    engine.destroy()
    engine = _engine(1, {"encryption_key": key})
    _, client_state = engine.load_checkpoint(str(base))
    assert client_state == {"note": SECRET}
    return [_step(engine, step) for step in range(2, 4)]


def test_a_run_goes_on_from_its_encrypted_checkpoint_at_another_number_of_ranks(tmp_path: Path) -> None:
    key, base = tmp_path / "key", tmp_path / "checkpoints"
    new_key_file(key)
    after = run_ranks(2, _saves, base, f"file:{key}")
    found = b"".join(file.read_bytes() for file in base.rglob("*") if file.is_file())
    assert SECRET.encode() not in found
    assert b"blocks" not in found
    assert run_ranks(1, _goes_on, base, f"file:{key}")[0] == pytest.approx(after[0], rel=1e-6)


def _wrong_keys(rank: int, world: int, base: Path) -> None:
    os.environ["MINE"] = bytes([rank] * 32).hex()
    engine = _engine(2, {"encryption_key": "env:MINE"})
    _step(engine, 0)
    with pytest.raises(CheckpointError, match="the ranks do not agree on tag, save_latest, keep, async, key"):
        engine.save_checkpoint(str(base))
    assert not base.exists() or not any(base.iterdir())
    if rank == 0:
        del os.environ["MINE"]
    with pytest.raises(CheckpointError, match="no such variable"):
        engine.save_checkpoint(str(base))


def test_ranks_with_different_keys_or_none_save_nothing(tmp_path: Path) -> None:
    run_ranks(2, _wrong_keys, tmp_path / "checkpoints")


def _loads_plain(rank: int, world: int, base: Path) -> None:
    engine = _engine(2, {})
    engine.save_checkpoint(str(base), "plain")
    engine.destroy()
    os.environ["MINE"] = KEY.secret.hex()
    engine = _engine(2, {"encryption_key": "env:MINE"})
    with pytest.warns(ZeroShardWarning, match="is not encrypted, although this run has a key"):
        engine.load_checkpoint(str(base))
    with pytest.raises(ConfigError, match="encryption_key"):
        _engine(2, {"encryption_key": 7})


def test_a_run_with_a_key_warns_of_a_checkpoint_in_the_clear(tmp_path: Path) -> None:
    run_ranks(1, _loads_plain, tmp_path)
