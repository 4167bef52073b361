"""A directory of checkpoints takes nothing that is not its own, follows no links, and keeps two jobs apart."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.saved import info_of, reads, save_tensors
from zeroshard.checkpoint import sink
from zeroshard.checkpoint.directory import find, next_order, prune, remove, whole
from zeroshard.checkpoint.draft import Draft, begin, write_manifest
from zeroshard.checkpoint.export.folder import new_folder
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.temporary_files import Owner, new_id
from zeroshard.checkpoint.writer import Piece, join_tables, write_pieces
from zeroshard.errors import CheckpointError


def save(base: Path, tag: str, value: int = 0) -> Path:
    return save_tensors(base, tag, {"w": torch.tensor([value])}, 1)


def value_of(folder: Path) -> int:
    with CheckpointReader(folder) as reader:
        assert reader.verify() == []
        return int(reader.tensor("w").read())


def write(draft: Draft, value: int) -> None:
    tensor = torch.tensor([value])
    write_pieces(draft.folder, 0, [Piece(info_of("w", tensor), 0, 1, reads(tensor))], {})


def finish(draft: Draft) -> Path:
    write_manifest(draft, join_tables(draft.folder, 1, {}, {}))
    return draft.publish(latest=True)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What is not ours.


def test_a_save_replaces_no_folder_that_is_not_a_checkpoint_of_ours(tmp_path: Path) -> None:
    for name, text in (("notes.txt", "mine"), (MANIFEST, '{"of": "another program"}'), ("sub/x", "mine")):
        folder = tmp_path / "tag"
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
        with pytest.raises(CheckpointError, match=r"tag: something that is no checkpoint.*left as it is"):
            begin(tmp_path, "tag")
        assert files(tmp_path) == {f"tag/{name}": text.encode()}
        shutil.rmtree(folder)
    (tmp_path / "tag").write_text("a file")
    with pytest.raises(CheckpointError, match="no checkpoint of zeroshard"):
        begin(tmp_path, "tag")
    draft = begin(tmp_path, "other")  # what comes while a save is written is not replaced either
    write(draft, 1)
    (tmp_path / "other" / "sub").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="other: something"):
        finish(draft)
    draft.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "tag"]


def test_a_damaged_checkpoint_of_ours_and_what_a_kill_left_of_one_are_replaced(tmp_path: Path) -> None:
    folder = save(tmp_path, "tag")
    for name in ("model-00000-0.safetensors", MANIFEST):
        (folder / name).write_bytes((folder / name).read_bytes()[:100])
        assert value_of(save(tmp_path, "tag", 1)) == 1
    (folder / MANIFEST).unlink()
    assert value_of(save(tmp_path, "tag", 2)) == 2


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_latest_that_is_no_file_is_refused_before_anything_is_written(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "latest")
    with pytest.raises(CheckpointError, match="latest is no file"):
        begin(tmp_path, "tag")
    assert os.listdir(tmp_path) == ["latest"]
    with pytest.raises(CheckpointError, match=r"latest can't be read \(no plain file\)"):
        find(tmp_path)
    begin(tmp_path, "tag", latest=False).close()


# Links.


def test_links_are_removed_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    away, base = tmp_path / "away", tmp_path / "base"
    kept = {tag: save(away, tag, number) for number, tag in enumerate(("one", "two", "three"))}
    before = files(away)
    base.mkdir()
    for tag, folder in kept.items():
        (base / tag).symlink_to(folder)
    assert [value_of(found.folder) for found in whole(base)] == [0, 1, 2], "reading follows them"
    assert value_of(save(base, "one", 7)) == 7
    assert not (base / "one").is_symlink()
    (base / f".x.{new_id()}.partial").symlink_to(away)
    (base / f".latest.{new_id()}.partial").symlink_to(away / "latest")
    (base / f".two.{new_id()}.old").symlink_to(kept["two"])
    assert value_of(save(base, "four", 8)) == 8
    assert prune(base, 1) == ["two", "three", "one"]
    assert sorted(os.listdir(base)) == ["four", "latest"]
    (base / "nothing").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="nothing: something"):
        begin(base, "nothing")
    assert files(away) == before


# Two jobs.


def test_two_jobs_that_save_under_one_tag_never_mix_and_the_later_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, "tag")
    first = begin(tmp_path, "tag")
    write(first, 1)
    with caplog.at_level(logging.WARNING):
        second = begin(tmp_path, "tag")
    assert "another save writes tag" in caplog.text
    write(second, 2)
    assert value_of(finish(first)) == 1
    assert value_of(finish(second)) == 2
    first.close()
    second.close()
    assert sorted(os.listdir(tmp_path)) == ["latest", "tag"]


def test_what_a_dead_job_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    for name in ("dead", "never.locked"):
        folder = tmp_path / f".{name}.{new_id()}.partial"
        folder.mkdir()
        (folder / "rank-00000.json").write_text("{}")
    dead = Owner(tmp_path)
    dead.path("tag").mkdir()
    os.close(dead._descriptor)  # as the kernel does
    living = begin(tmp_path, "living")
    save(tmp_path, "tag")
    assert sorted(os.listdir(tmp_path)) == sorted([f".{living.owner.id}.lock", living.folder.name, "latest", "tag"])
    living.close()
    assert sorted(os.listdir(tmp_path)) == ["latest", "tag"]


def test_a_checkpoint_that_was_to_be_replaced_at_a_kill_is_found_until_it_is(tmp_path: Path) -> None:
    save(tmp_path, "tag", 1).rename(tmp_path / f".tag.{new_id()}.old")
    save(tmp_path, "tag", 2).rename(tmp_path / f".tag.{new_id()}.old")
    save(tmp_path, "other", 3)
    assert [value_of(found.folder) for found in whole(tmp_path)] == [2, 3]
    assert value_of(find(tmp_path, "tag")) == 2
    save(tmp_path, "tag", 4)
    save(tmp_path, "next", 5)
    assert sorted(os.listdir(tmp_path)) == ["latest", "next", "other", "tag"]


def test_jobs_that_replace_each_other_at_once_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    """Forked writers: one tag, over and over; whoever looks at any time finds one that is whole."""
    save(tmp_path, "tag")
    children: list[int] = []
    for number in range(3):
        child = os.fork()
        if not child:
            code = 1
            try:
                for _ in range(25):
                    save(tmp_path, "tag", number)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    alive, looks = set(children), 0
    while alive:
        for child in list(alive):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                alive.discard(child)
                assert status == 0
        looks += 1
        assert [found.tag for found in whole(tmp_path)] == ["tag"]
    assert looks > 3
    assert value_of(find(tmp_path)) in range(3)
    assert sorted(os.listdir(tmp_path)) == ["latest", "tag"]


def test_what_another_job_has_just_saved_is_not_pruned_for_what_it_replaced(
    tmp_path: Path,
) -> None:
    save(tmp_path, "tag", 1)
    old = whole(tmp_path)[0]
    save(tmp_path, "tag", 2)
    remove(old)
    assert value_of(find(tmp_path, "tag")) == 2
    remove(whole(tmp_path)[0])
    assert os.listdir(tmp_path) == ["latest"]


# The order.


def test_the_order_is_that_of_the_saves_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour, now = 3_600_000_000_000, time.time_ns()
    for number in range(4):
        monkeypatch.setattr(time, "time_ns", lambda number=number: now - number * hour)
        os.utime(save(tmp_path, f"step{number}") / MANIFEST, ns=(0, now - number * hour))
    assert [found.tag for found in whole(tmp_path)] == ["step0", "step1", "step2", "step3"]
    assert next_order(tmp_path) == now + 4
    assert prune(tmp_path, 2) == ["step0", "step1"]
    (tmp_path / "latest").unlink()
    assert find(tmp_path).name == "step3"


# The disk.


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_without_space_is_an_error_that_names_the_file_and_leaves_nothing(
    tmp_path: Path, background: bool, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "DIRECT_FROM", 1 if direct else 1 << 40)
    model, _ = zeroshard.shard(nn.Linear(100, 100), optimizer=torch.optim.SGD)

    def save_two() -> None:
        zeroshard.save(model, tmp_path, "two", background=background)
        zeroshard.wait_for_checkpoint(model)

    zeroshard.save(model, tmp_path, "one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"model-00000-0\.safetensors: File too large"):
            save_two()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(os.listdir(tmp_path)) == ["latest", "one"]
    assert find(tmp_path).name == "one"
    save_two()
    assert find(tmp_path).name == "two"
    zeroshard.close(model)


def test_a_save_in_the_background_ends_where_it_began_though_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    folder = zeroshard.save(model, "saved", "one", background=True)
    monkeypatch.chdir(tmp_path / "other")
    zeroshard.wait_for_checkpoint(model)
    assert folder == find(tmp_path / "saved")
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("kind", ["file", "dangling link", "loop"])
def test_a_directory_that_is_none_is_said_to_be_none(tmp_path: Path, kind: str) -> None:
    base = tmp_path / "base"
    if kind == "file":
        base.write_text("mine")
    else:
        base.symlink_to("nowhere" if kind == "dangling link" else "base")
    model = nn.Linear(4, 4)
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=0)
    with pytest.raises(CheckpointError, match=r"base: it is no directory \(but a file, or a link that leads to none\)"):
        zeroshard.save(model, base, "one")


def test_two_exports_to_one_folder_never_mix(tmp_path: Path) -> None:
    def both() -> None:
        with new_folder(tmp_path / "out") as one:
            (one / "a").write_text("of one")
            with new_folder(tmp_path / "out") as other:
                (other / "b").write_text("of the other")

    with pytest.raises(CheckpointError, match="out can't be written"):
        both()
    assert files(tmp_path) == {"out/b": b"of the other"}
