"""Checkpoints that are copied to a store of objects, and saves that fail without ending the training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.checkpoint.remote import Remote
from zeroshard.errors import CheckpointError, UsageError


def _engine(**checkpoint: Any) -> Any:
    torch.manual_seed(2)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
        "checkpoint": checkpoint,
    }
    return zeroshard.initialize(model=torch.nn.Linear(4, 3), config=config)[0]


def _step(engine: Any) -> None:
    engine.backward(engine(torch.ones(4 // engine.plan.dp, 4)).square().mean())
    engine.step()


def _copied_and_fetched(rank: int, size: int, directory: str) -> bool:
    base = Path(directory)
    url = f"file://{base}/bucket/run"
    engine = _engine(remote=url, keep=2, **{"async": True})
    for _ in range(3):
        _step(engine)
        engine.save_checkpoint(base / "disk")
    engine.wait_for_checkpoint()
    state = zeroshard.full_state_dict(engine.module)
    engine.destroy()
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(base / "disk")
    torch.distributed.barrier()
    again = _engine(remote=url, directory=str(base / "disk"))
    folder, _ = again.resume()
    assert folder == str(base / "disk" / "global_step3")
    same = all(torch.equal(value, state[name]) for name, value in zeroshard.full_state_dict(again.module).items())
    again.destroy()
    return same and again.global_steps == 3


def test_a_checkpoint_is_copied_by_all_ranks_pruned_there_and_fetched_where_the_disk_is_lost(tmp_path: Path) -> None:
    assert run_ranks(2, _copied_and_fetched, str(tmp_path)) == [True, True]
    copies = tmp_path / "bucket" / "run"
    assert sorted(path.name for path in copies.iterdir()) == ["global_step2", "global_step3", "latest"]
    assert (copies / "latest").read_text() == "global_step3"


def _goes_on(rank: int, size: int, directory: str) -> list[bool]:
    base = Path(directory)
    (base / "file").write_text("in the way")
    engine = _engine(on_failure="warn", **{"async": True})
    results: list[bool] = []
    for place in ("disk", "file", "disk"):
        _step(engine)
        results.append(engine.save_checkpoint(base / place))
    engine.wait_for_checkpoint()
    engine.destroy()
    strict = _engine()
    with pytest.raises(CheckpointError, match="it is no directory"):
        strict.save_checkpoint(base / "file")
    strict.destroy()
    return results


def test_training_goes_on_after_a_save_that_fails_where_the_config_says_so(tmp_path: Path) -> None:
    assert run_ranks(2, _goes_on, str(tmp_path)) == [[True, False, True]] * 2
    assert (tmp_path / "disk" / "latest").read_text() == "global_step3"


def _whole(folder: Path, order: int) -> None:
    folder.mkdir(parents=True)
    (folder / "model-00000-0.safetensors").write_bytes(bytes(8))
    (folder / "checkpoint.json").write_text(json.dumps({"order": order}))


def test_a_copy_without_its_table_is_none_and_the_newest_is_that_of_the_last_save(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.rm("/run", recursive=True) if store.exists("/run") else None
    remote = Remote("memory://run")
    assert remote.fetch_newest(tmp_path / "disk") is None
    for order, tag in enumerate(("b", "a", "c")):
        _whole(tmp_path / tag, order)
        remote.put_files(tmp_path / tag, 0)
        if tag != "c":
            remote.finish(tmp_path / tag, latest=False, keep=None)
    assert remote.tags() == ["b", "a"]
    assert remote.fetch_newest(tmp_path / "disk") == "a"
    assert sorted(path.name for path in (tmp_path / "disk" / "a").iterdir()) == [
        "checkpoint.json",
        "model-00000-0.safetensors",
    ]
    remote.finish(tmp_path / "c", latest=True, keep=1)
    assert remote.tags() == ["c"]


def test_a_store_that_nothing_is_installed_for_is_named() -> None:
    with pytest.raises(UsageError, match=r"checkpoint\.remote nosuch://bucket"):
        Remote("nosuch://bucket/run")
