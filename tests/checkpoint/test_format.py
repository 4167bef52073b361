"""The format holds what was written, byte for byte; torch reads it; nothing in it is believed before it is checked."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import HuggingFaceStorageReader

from tests.support.saved import save_tensors
from zeroshard.checkpoint import jsonfile, manifest, sink
from zeroshard.checkpoint.directory import find, prune, whole
from zeroshard.checkpoint.manifest import MANIFEST, TensorKind
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.slices import rectangles
from zeroshard.errors import CheckpointError, ZeroShardWarning

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_flat_range_is_few_rectangles_that_hold_exactly_its_elements(shape: tuple[int, ...], data: Any) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).reshape(shape)
    found = rectangles(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    seen: list[int] = []
    for cut in found:
        values = numbers[tuple(slice(o, o + s) for o, s in zip(cut.offsets, cut.sizes, strict=True))]
        assert values.reshape(-1).tolist() == list(range(cut.start, cut.stop))
        seen += values.reshape(-1).tolist()
    assert seen == list(range(start, stop))


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "blocks.0.weight": torch.randn(7, 5, generator=generator),
        "blocks.0.bias": torch.randn(5, generator=generator),
        "conv.weight": torch.randn(3, 2, 3, 5, generator=generator),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "scale": torch.tensor(1.5),
        "count": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "mask": torch.tensor([True, False, True]),
        "state.blocks.0.weight.exp_avg": torch.randn(7, 5, generator=generator),
        "state.blocks.0.weight.step": torch.tensor(4.0),
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_what_ranks_wrote_is_read_whole_and_in_any_part(tmp_path: Path, ranks: int) -> None:
    tensors = _tensors()
    folder = save_tensors(tmp_path, "one", tensors, ranks, {"tied": "blocks.0.weight"})
    with CheckpointReader(folder) as reader:
        assert set(reader.names()) == set(tensors)
        assert set(reader.names(TensorKind.OPTIMIZER)) == {name for name in tensors if name.startswith("state.")}
        for name, tensor in tensors.items():
            saved = reader.tensor(name)
            assert (saved.shape, saved.dtype) == (tuple(tensor.shape), tensor.dtype)
            assert torch.equal(saved.read(), tensor), name
            half = tensor.numel() // 2
            assert torch.equal(saved.read_flat(half, tensor.numel()), tensor.reshape(-1)[half:])
        assert torch.equal(reader.tensor("tied").read_rectangle((2, 1), (4, 3)), tensors["blocks.0.weight"][2:6, 1:4])
        assert torch.equal(
            reader.tensor("conv.weight").read_rectangle((1, 0, 1, 2), (2, 1, 2, 3)),
            tensors["conv.weight"][1:, :1, 1:, 2:],
        )
        assert reader.state == {"step": 7}
        assert list(reader.manifest.ranks) == [{"rank": rank} for rank in range(ranks)]
        assert reader.verify() == []


def test_torch_reads_it_as_its_own_sharded_safetensors(tmp_path: Path) -> None:
    tensors = _tensors()
    folder = save_tensors(tmp_path, "one", tensors, 3)
    model = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if not name.startswith("state.")}
    dcp.load(model, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert all(torch.equal(model[name], tensors[name]) for name in model)
    optimizer = {"state": {"blocks.0.weight": {"exp_avg": torch.zeros(7, 5), "step": torch.zeros(())}}}
    dcp.load(optimizer, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert torch.equal(optimizer["state"]["blocks.0.weight"]["exp_avg"], tensors["state.blocks.0.weight.exp_avg"])
    assert float(optimizer["state"]["blocks.0.weight"]["step"]) == 4.0


def test_a_tensor_of_several_blocks_is_written_directly_and_each_block_is_guarded_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "DIRECT_FROM", 1)
    tensor = torch.arange(3 * manifest.BLOCK // 4 + 12345, dtype=torch.int32)
    folder = save_tensors(tmp_path, "one", {"w": tensor}, 1)
    with CheckpointReader(folder) as reader:
        assert torch.equal(reader.tensor("w").read(), tensor)
        low, high = manifest.BLOCK // 4 - 7, manifest.BLOCK // 2 + 9
        assert torch.equal(reader.tensor("w").read_flat(low, high), tensor[low:high])
    file = folder / "model-00000-0.safetensors"
    with file.open("r+b") as stream:  # in the last block
        stream.seek(-100, os.SEEK_END)
        stream.write(b"x")
    with CheckpointReader(folder) as reader:
        assert torch.equal(reader.tensor("w").read_flat(low, high), tensor[low:high])
        with pytest.raises(CheckpointError, match=r"model-00000-0.safetensors is damaged: tensor 'w'"):
            reader.tensor("w").read_flat(low, tensor.numel())
        assert len(reader.verify()) == 1


# Damage and malice.


def _problems(folder: Path) -> str:
    try:
        with CheckpointReader(folder) as reader:
            return "; ".join(reader.verify())
    except CheckpointError as error:
        return str(error)


def _expect(folder: Path, name: str) -> None:
    assert str(folder / name) in _problems(folder), (name, _problems(folder))


def test_any_flipped_bit_cut_off_end_or_missing_file_is_named(tmp_path: Path) -> None:
    folder = save_tensors(tmp_path, "one", _tensors(), 2)
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        places = range(len(data)) if file.suffix == ".safetensors" else range(0, len(data), 97)
        for place in [*places][:: max(1, len(places) // 25)]:
            file.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
            if file.name != MANIFEST or not _same(file, data):
                _expect(folder, file.name)
        for cut in (0, 5, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:cut])
            _expect(folder, file.name)
        file.unlink()
        _expect(folder, file.name)
        file.write_bytes(data)
    with CheckpointReader(folder) as reader:
        assert reader.verify() == []


def _same(file: Path, data: bytes) -> bool:
    """Whether a change of the JSON text changed no value (white space, say)."""
    try:
        return json.loads(file.read_bytes()) == json.loads(data)
    except ValueError:
        return False


def _part(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"]["blocks.0.weight"]["parts"][0]


def _rename(table: dict[str, Any], old: str, new: str) -> None:
    table[new] = table.pop(old)


HOSTILE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: _rename(c["files"], "model-00000-0.safetensors", "../model-00000-0.safetensors"), "refused"),
    (lambda c: _part(c).update(file="../../etc/passwd"), "refused"),
    (lambda c: _part(c).update(file="/etc/passwd"), "refused"),
    (lambda c: _rename(c["tensors"], "half", "../half"), "could lead out"),
    (lambda c: _rename(c["tensors"], "half", "a\nb"), "no name"),
    (lambda c: _rename(c["tensors"], "half", "x" * 2000), "no name"),
    (lambda c: c["tensors"]["half"].update(shape=[1 << 60]), "missing"),
    (lambda c: c["tensors"]["half"].update(shape=[1 << 61]), "missing|refused"),
    (lambda c: c["tensors"]["half"].update(shape=[1 << 70]), "no size"),
    (lambda c: c["tensors"]["half"].update(shape=[-3, -3]), "no size"),
    (lambda c: c["tensors"]["half"].update(shape=[True] * 9), "no size"),
    (lambda c: c["tensors"]["half"].update(dtype="F128"), "unknown"),
    (lambda c: c["tensors"]["half"].update(dtype=["F32"]), "unknown"),
    (lambda c: c["tensors"]["half"].update(kind="code"), "code"),
    (lambda c: c["tensors"]["half"].update(parts=[]), "missing"),
    (lambda c: c["tensors"]["half"]["parts"].append(c["tensors"]["half"]["parts"][0]), "twice"),
    (lambda c: _part(c).update(begin=1 << 50), "beyond the end"),
    (lambda c: _part(c).update(offsets=[0, 1]), "no part"),
    (lambda c: _part(c).update(offsets=[-1, 0]), "no size"),
    (lambda c: _part(c).update(crc32=[]), "0 checksums"),
    (lambda c: c.update(world_size="many"), "no size"),
    (lambda c: c.update(version=99), "version 99"),
    (lambda c: c.update(format="else"), "not the table"),
    (lambda c: c.update(aliases={"half": "count"}), "another name"),
    (lambda c: c.update(aliases={"x": "nowhere"}), "another name"),
    (lambda c: c.update(state=[]), "what they must be"),
    (lambda c: c.pop("files"), "files"),
]


def test_a_table_that_lies_is_refused_before_anything_is_opened_or_allocated(tmp_path: Path) -> None:
    folder = save_tensors(tmp_path, "one", _tensors(), 2)
    original = jsonfile.decode((folder / MANIFEST).read_bytes(), folder)
    for change, words in HOSTILE:
        content = json.loads(json.dumps(original))
        change(content)
        (folder / MANIFEST).write_bytes(jsonfile.encode(content))
        with pytest.raises(CheckpointError, match=words):
            CheckpointReader(folder)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a": ' * 50_000,
        b"[]",
        b"null",
        b"",
        b"\xff\xfe",
        b'{"checksum": 1, "checksum": 2}',
        b'{"checksum": NaN}',
        b'{"checksum": 1e999}',
        b'{"checksum": 1, "state": [1e999]}',
        b'{"checksum": 1, "state": {"x": -1e400}}',
        b'{"checksum": 1, "state": Infinity}',
        b'{"checksum": 1, "state": %s}' % (b"9" * 5000),
        b'{"checksum": 1, "state": "\\ud800"}',
        b'{"checksum": null}',
        b"{" + b" " * 100,
    ],
)
def test_hostile_json_is_an_error_that_names_the_file(tmp_path: Path, text: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(text)
    with pytest.raises(CheckpointError, match=MANIFEST):
        CheckpointReader(tmp_path)


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    folder = save_tensors(tmp_path, "one", _tensors(), 1)
    for name in ("model-00000-0.safetensors", MANIFEST):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(CheckpointError, match=f"{name} is no plain file"):
            CheckpointReader(folder)


# The directory.


def test_the_newest_is_found_with_and_without_latest_and_the_rest_is_pruned(tmp_path: Path) -> None:
    for number in range(4):
        save_tensors(tmp_path, f"step{number}", {"w": torch.tensor([number])}, 1)
    assert [found.tag for found in whole(tmp_path)] == ["step0", "step1", "step2", "step3"]
    assert find(tmp_path).name == "step3"
    (tmp_path / "latest").unlink()
    assert find(tmp_path).name == "step3"
    for text in ("", "step9", "../step1", "\0" * 5000):
        (tmp_path / "latest").write_text(text)
        with pytest.warns(ZeroShardWarning, match=re.escape(repr(text[:80]))):
            assert find(tmp_path).name == "step3"
    (tmp_path / "latest").write_text("step0")
    assert find(tmp_path).name == "step0"
    assert prune(tmp_path, 2) == ["step1"]
    assert prune(tmp_path, 1) == ["step2"]  # what 'latest' names stays
    assert [found.tag for found in whole(tmp_path)] == ["step0", "step3"]
    shutil.rmtree(tmp_path / "step3")
    assert prune(tmp_path, 0) == []


# Kills.


def _write_and_die(base: Path, tag: str, value: int, at: int) -> bool:
    """Save in a child process that is killed at its file operation number `at`; whether it lived to the end."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save_tensors(base, tag, {"w": torch.tensor([value])}, 2)
    prune(base, 2, protect=tag)
    os._exit(0)


@pytest.mark.parametrize("tag", ["run", "next"])
def test_a_kill_at_any_file_operation_leaves_the_older_or_the_newer_one_whole(tmp_path: Path, tag: str) -> None:
    kills, lived = 0, False
    while not lived:
        base = tmp_path / str(kills)
        for number in range(3):
            save_tensors(base, f"older{number}", {"w": torch.tensor([-1])}, 1)
        save_tensors(base, "run", {"w": torch.tensor([1])}, 2)
        lived = _write_and_die(base, tag, 2, kills + 1)
        kills += not lived
        for found in whole(base):
            with CheckpointReader(found.folder) as reader:
                assert reader.verify() == [], kills
        with CheckpointReader(find(base)) as reader:
            value = int(reader.tensor("w").read())
        assert value in ((2,) if lived else (1, 2)), kills
        # A kill leaves nothing that stands in the way of the next save.
        save_tensors(base, "run", {"w": torch.tensor([3])}, 2)
        with CheckpointReader(find(base)) as reader:
            assert int(reader.tensor("w").read()) == 3
        assert not [folder.name for folder in base.iterdir() if folder.name.endswith(".partial")]
    assert kills >= 15
