"""Signed checkpoints: a load that demands a signature takes what one of its keys has signed, byte for byte."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
from typer.testing import CliRunner

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.installed import need
from tests.support.saved import save_tensors
from zeroshard.checkpoint.cli import app
from zeroshard.checkpoint.directory import SIGNATURE
from zeroshard.checkpoint.keys import LocalKey
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.rekey import rekey
from zeroshard.checkpoint.remote import Remote
from zeroshard.checkpoint.signature import (
    SIGNERS_ENVIRONMENT,
    LocalSigner,
    check_signature,
    public_keys,
    public_text,
    sign,
    signer_of,
    trusted_keys,
)
from zeroshard.errors import CheckpointError

need("cryptography")

EDITS = int(os.environ.get("ZEROSHARD_EDITS", "150"))
SIGNER = LocalSigner(bytes(range(32)))
OTHER = LocalSigner(bytes(32))
TENSORS = {"weight": torch.arange(3000.0).view(60, 50), "state.weight.exp_avg": torch.full((60, 50), 0.25)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = save_tensors(tmp_path / "checkpoints", "step1", TENSORS, 2)
    sign(folder, SIGNER)
    return folder


def _refused(folder: Path, signer: LocalSigner = SIGNER) -> str | None:
    try:
        check_signature(folder, [signer.public])
    except CheckpointError as error:
        return str(error)
    return None


def _tensors(folder: Path) -> Path:
    return next(folder.glob("model-00001-*.safetensors"))


def _flip(folder: Path) -> Path:
    file = _tensors(folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


def _table(folder: Path) -> Path:
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes().replace(b'"order": 1', b'"order": 7', 1))
    return folder / MANIFEST


def _remove(folder: Path) -> Path:
    file = _tensors(folder)
    file.unlink()
    return file


def _add(folder: Path) -> Path:
    return Path(shutil.copy(_tensors(folder), folder / "model-00007-0.safetensors"))


def _swap(folder: Path) -> Path:
    one, other = _tensors(folder), next(folder.glob("model-00000-*.safetensors"))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    return other


@pytest.mark.parametrize("edit", [_flip, _table, _remove, _add, _swap])
def test_a_file_that_is_not_what_was_signed_is_named(saved: Path, edit: Callable[[Path], Path]) -> None:
    assert _refused(saved) is None
    file = edit(saved)
    assert str(file) in str(_refused(saved))


def test_another_key_or_no_signature_is_refused(saved: Path, tmp_path: Path) -> None:
    assert f"signed by {public_text(SIGNER.public)}, which is none" in str(_refused(saved, OTHER))
    content = json.loads((saved / SIGNATURE).read_bytes())
    content["key"] = public_text(OTHER.public)
    (saved / SIGNATURE).write_text(json.dumps(content))
    assert SIGNATURE in str(_refused(saved, OTHER))
    plain = save_tensors(tmp_path / "plain", "step1", TENSORS, 1)
    assert "is not signed" in str(_refused(plain))


def test_every_random_edit_is_found(saved: Path, tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("ZEROSHARD_EDITS_SEED", "5")))
    files = sorted(file for file in saved.iterdir() if file.is_file())
    for number in range(EDITS):
        file = chance.choice(files)
        before = file.read_bytes()
        data, place = bytearray(before), chance.randrange(len(before))
        if chance.random() < 0.5:
            data[place] ^= 1 << chance.randrange(8)
        else:
            del data[place : place + chance.randrange(1, 9)]
        file.write_bytes(data)
        found = _refused(saved)
        assert found is not None, f"edit {number} of {file.name} at {place}"
        assert file.name in found, found
        file.write_bytes(before)
    assert _refused(saved) is None


def test_ranks_divide_the_files_and_together_read_each(saved: Path) -> None:
    for file in (_tensors(saved), next(saved.glob("model-00000-*.safetensors")), saved / MANIFEST):
        before = file.read_bytes()
        file.write_bytes(before[:-1] + b"?")
        refused = 0
        for share in range(3):
            try:
                check_signature(saved, [SIGNER.public], share=share, shares=3)
            except CheckpointError:
                refused += 1
        assert refused == (3 if file.name == MANIFEST else 1)
        file.write_bytes(before)


def test_public_keys_come_from_texts_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [public_text(one.public) for one in (SIGNER, OTHER)]
    file = tmp_path / "trusted"
    file.write_text(f"# ours\n{texts[0]}\n\n  {texts[1]}\n")
    both = (SIGNER.public, OTHER.public)
    assert public_keys(texts) == public_keys(f"file:{file}") == both
    assert trusted_keys(None) == ()
    monkeypatch.setenv(SIGNERS_ENVIRONMENT, " ".join(texts))
    assert trusted_keys(None) == both
    assert trusted_keys(texts[1]) == (OTHER.public,)
    (tmp_path / "empty").write_text("# none\n")
    files = (f"file:{tmp_path / 'none'}", f"file:{tmp_path / 'empty'}")
    for wrong in ("ed25519:", "ed25519:AAAA", SIGNER.public.hex(), *files):
        with pytest.raises(CheckpointError, match=r"public key|missing|not there"):
            public_keys(wrong)
    assert signer_of("command:echo " + SIGNER.secret.hex()) == SIGNER
    with pytest.raises(CheckpointError, match="signing key of 3 characters names no place"):
        signer_of("key")


@dataclass(frozen=True)
class _Service:
    """A key management service that gives what it is told to."""

    public: bytes
    signature: bytes

    def sign(self, message: bytes) -> bytes:
        return self.signature


@pytest.mark.parametrize(
    ("signer", "why"),
    [
        (_Service(SIGNER.public, SIGNER.sign(b"a hash of the message")), "no load would accept it"),
        (_Service(SIGNER.public, b"short"), "64 bytes of a signature"),
        (_Service(b"short", bytes(64)), "32 bytes of a public key"),
        (_Service(cast(bytes, "text"), bytes(64)), "32 bytes of a public key"),
    ],
)
def test_what_is_no_signature_is_not_written(saved: Path, signer: _Service, why: str) -> None:
    before = (saved / SIGNATURE).read_bytes()
    with pytest.raises(CheckpointError, match=why):
        sign(saved, signer)
    assert (saved / SIGNATURE).read_bytes() == before


def test_a_new_key_of_an_encrypted_checkpoint_is_signed_too(tmp_path: Path) -> None:
    old, new = LocalKey(bytes([1] * 32)), LocalKey(bytes([2] * 32))
    folder = save_tensors(tmp_path, "step1", TENSORS, 2, service=old)
    sign(folder, SIGNER)
    assert _refused(folder) is None  # without its key
    with pytest.raises(CheckpointError, match="--signing-key"):
        rekey(folder, old, new)
    with pytest.raises(CheckpointError, match="none of the"):
        rekey(folder, old, new, OTHER)
    before = (folder / SIGNATURE).read_bytes()
    assert rekey(folder, old, new, SIGNER)
    assert _refused(folder) is None
    (folder / SIGNATURE).write_bytes(before)  # a kill came between the table and its signature
    assert MANIFEST in str(_refused(folder))
    assert not rekey(folder, old, new, SIGNER)
    assert _refused(folder) is None


def test_the_signature_goes_to_an_object_store_and_comes_back(saved: Path, tmp_path: Path) -> None:
    need("fsspec")
    remote = Remote(f"file://{tmp_path / 'store'}")
    for rank in range(2):
        remote.put_files(saved, rank)
    remote.finish(saved, latest=True, keep=None)
    assert remote.fetch_newest(tmp_path / "fetched") == "step1"
    assert _refused(tmp_path / "fetched" / "step1") is None


def _run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"NO_COLOR": "1", "COLUMNS": "200"})
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout


def test_the_commands_make_a_key_sign_and_verify(tmp_path: Path) -> None:
    folder = save_tensors(tmp_path / "checkpoints", "step1", TENSORS, 2)
    key = tmp_path / "key"
    public = json.loads(_run("new-signing-key", str(key), "--json"))["public"]
    assert key.stat().st_mode & 0o777 == 0o600
    assert "is not signed" in _run("verify", str(folder), "--signed-by", public, status=1)
    _run("sign", str(folder.parent), "--key", f"file:{key}")
    assert "its signature was not checked" in _run("verify", str(folder))
    assert "signed as demanded" in _run("verify", str(folder), "--signed-by", public)
    assert json.loads(_run("verify", str(folder), "--signed-by", public, "--json"))["signature checked"]
    other = public_text(OTHER.public)
    assert "none of the" in _run("verify", str(folder), "--signed-by", other, status=1)
    assert "is whole" in _run("verify", str(folder), "--signed-by", other, "--signed-by", public)


def _engine(checkpoint: dict[str, object]) -> zeroshard.Engine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3},
        "checkpoint": checkpoint,
    }
    return zeroshard.initialize(model=torch.nn.Linear(7, 5), config=config)[0]


def _step(engine: zeroshard.Engine) -> None:
    engine.backward(engine(torch.ones(2, 7)).square().mean())
    engine.step()


def _trains(rank: int, world: int, base: Path, background: bool) -> None:
    if rank == 0:
        os.environ["MINE"] = SIGNER.secret.hex()  # the other rank never has the private key
    public = public_text(SIGNER.public)
    engine = _engine({"signing_key": "env:MINE", "signed_by": [public_text(OTHER.public), public]})
    _step(engine)
    engine.save_checkpoint(str(base), "one")
    engine.wait_for_checkpoint()
    if background:
        engine.destroy()
        engine = _engine({"signing_key": "env:MINE", "signed_by": public, "async": True})
        _step(engine)
        engine.save_checkpoint(str(base), "one")
        engine.wait_for_checkpoint()
    engine.load_checkpoint(str(base))
    before = zeroshard.full_state_dict(engine.module)
    file = next((base / "one").glob("model-00001-*.safetensors"))
    data = bytearray(file.read_bytes())
    zeroshard.drain(engine.module)
    torch.distributed.barrier()
    if rank == 1:
        data[-1] ^= 1
        file.write_bytes(data)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=rf"{file.name} is not what was signed"):
        engine.load_checkpoint(str(base))
    after = zeroshard.full_state_dict(engine.module)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    engine.destroy()
    engine = _engine({"signed_by": public_text(OTHER.public)})
    with pytest.raises(CheckpointError, match="none of the"):
        engine.load_checkpoint(str(base))


@pytest.mark.parametrize("background", [False, True])
def test_a_run_signs_what_it_saves_and_loads_only_that(tmp_path: Path, background: bool) -> None:
    run_ranks(2, _trains, tmp_path / "checkpoints", background)
