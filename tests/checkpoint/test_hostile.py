"""A hostile checkpoint is refused with a reason, in bounded time and memory, and nothing in it runs.

Each bomb here is a real one: Python's own readers would run it, unpack it or fall over it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import shutil
import struct
import subprocess
import tempfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.checkpoint.any_checkpoint import open_checkpoint
from zeroshard.checkpoint.foreign.deepspeed import find, open_deepspeed
from zeroshard.checkpoint.foreign.inert import Inert
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.checkpoint.foreign.unpickle import Limits, unpickle
from zeroshard.errors import CheckpointError

FIXTURE = Path(__file__).parent / "deepspeed" / "checkpoints" / "zero1" / "step3"


class Runs:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def nested(levels: int, kind: bytes = b"]") -> bytes:
    """A list in a list in a list; as tuples with `kind` b")"."""
    step = b"\x85" if kind == b")" else b""
    if step:
        return b"\x80\x04" + kind + step * levels + b"."
    return b"\x80\x04" + kind * levels + b"a" * (levels - 1) + b"."


def laughs(levels: int) -> bytes:
    """Ten references to ten references to ...: 10**levels values in a few hundred bytes."""
    out = b"\x80\x04]q\x00"
    for level in range(levels):
        out += b"0]q" + bytes([level + 1]) + b"(" + (b"h" + bytes([level])) * 10 + b"e"
    return out + b"."


def loop() -> bytes:
    return b"\x80\x04]q\x00h\x00a."


BOMBS: dict[str, tuple[bytes, str]] = {
    "os.system": (pickle.dumps(Runs(__import__("os").system, "touch RAN")), "made to run code"),
    "subprocess": (pickle.dumps(Runs(subprocess.check_output, ["touch", "RAN"])), "made to run code"),
    "eval": (pickle.dumps(Runs(eval, "open('RAN', 'w')")), "made to run code"),
    "import": (pickle.dumps(Runs(__import__, "antigravity")), "made to run code"),
    "old protocol": (b"cos\nsystem\n(S'touch RAN'\ntR.", "made to run code"),
    "INST": (b"(Vtouch RAN\nios\nsystem\n.", "operation b'i'"),
    "dotted": (b"\x80\x04\x8c\x08builtins\x8c\x09exec.real\x93.", "made to run code"),
    "nesting": (nested(20_000), "nested deeper"),
    "nested tuples": (nested(20_000, b")"), "nested deeper"),
    "deep key": (b"\x80\x04})" + b"\x85" * 20_000 + b"Ns.", "a key of type tuple"),
    "laughs": (laughs(30), "written out"),
    "loop": (loop(), "contains itself"),
    "long number as key": (b"\x80\x04}\x8a\x20" + b"\x7f" * 32 + b"Ns.", "a key of type int"),
    "missing memo": (b"\x80\x04j\xff\xff\xff\x7f.", "never stored"),
    "no mark": (b"\x80\x04Nt.", "mark"),
    "empty": (b"", "damaged"),
    "cut off": (pickle.dumps({"a": [1, 2, 3]})[:-4], "damaged"),
    "long text": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.", "damaged"),
    "persistent": (b"\x80\x02X\x01\0\0\0aQ.", "outside of itself"),
    "extension": (b"\x80\x02\x82\x01.", "no checkpoint uses"),
    "call of a call": (pickle.dumps(Runs(Inert, None))[:-1] + b")R.", "made itself"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_without_running_it(bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, reason = BOMBS[bomb]
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=reason):
        unpickle(data, "file")
    assert time.monotonic() - started < 5
    assert not (tmp_path / "RAN").exists()


def test_what_python_would_import_or_call_stays_a_name() -> None:
    class_of_a_user = pickle.dumps({"args": Runs(shutil.ReadError, "x"), "path": Path("/etc")}, protocol=4)
    with pytest.raises(CheckpointError, match="made to run code"):
        unpickle(class_of_a_user, "file")
    value = unpickle(pickle.dumps({"path": Path("/etc")}, protocol=4), "file")
    assert isinstance(value["path"], Inert)
    assert str(value["path"].of).startswith("pathlib.")


def test_one_number_allocates_nothing() -> None:
    """LONG_BINPUT with a huge index makes Python's own reader allocate 16 GiB."""
    tracemalloc.start()
    assert unpickle(b"\x80\x02]r\xff\xff\xff\x7f.", "file") == []
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_limits_hold(tmp_path: Path) -> None:
    limits = Limits(pickle_bytes=5000, operations=100, containers=20)
    with pytest.raises(CheckpointError, match="bytes, more than"):
        unpickle(pickle.dumps("x" * 6000), "file", limits=limits)
    with pytest.raises(CheckpointError, match="operations"):
        unpickle(pickle.dumps(list(range(200))), "file", limits=limits)
    with pytest.raises(CheckpointError, match="containers"):
        unpickle(pickle.dumps([[] for _ in range(30)]), "file", limits=limits)
    text = "x" * 4000
    many = pickle.dumps([Runs(__import__("_codecs").encode, text, "latin1") for _ in range(3)], protocol=2)
    with pytest.raises(CheckpointError, match="over and over"):
        unpickle(many, "file", limits=Limits(pickle_bytes=5000))


def saved(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "file.pt"
    torch.save(value, path)
    return path


def test_what_torch_saves_is_read_lazily_and_exactly(tmp_path: Path) -> None:
    base = torch.randn(6, 5)
    value = {
        "whole": base,
        "turned": base.t(),
        "part": base[1:4, 2],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "bits": torch.tensor([True, False]),
        "bf16": torch.randn(3).bfloat16(),
        "f8": torch.randn(4).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "plain": [1, 2.5, None, "text", (1, {2}), b"bytes", torch.float16, torch.Size([2, 3]), 1 << 80],
    }
    found = load(saved(tmp_path, value))
    assert found["plain"] == [1, 2.5, None, "text", (1, {2}), b"bytes", torch.float16, (2, 3), 1 << 80]
    for name, tensor in value.items():
        if isinstance(tensor, torch.Tensor):
            read = found[name].read()
            assert read.dtype == tensor.dtype
            assert read.is_contiguous()
            assert read.shape == tensor.shape
            assert read.flatten().view(torch.uint8).tolist() == bits(tensor), name


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().flatten().view(torch.uint8).tolist()


def rebuilt(path: Path, change: Callable[[str, bytes], tuple[str, bytes]], **options: Any) -> Path:
    """The archive again, written by Python's zipfile, with entries changed."""
    out = path.with_suffix(".new.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w", **options) as target:
        for info in source.infolist():
            target.writestr(*change(info.filename, source.read(info)))
    return out


def test_zip_tricks_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"zeros": torch.zeros(1000)})

    def same(name: str, data: bytes) -> tuple[str, bytes]:
        return name, data

    assert load(rebuilt(path, same))["zeros"].shape == (1000,)
    with pytest.raises(CheckpointError, match="compressed"):
        load(rebuilt(path, same, compression=zipfile.ZIP_DEFLATED))
    for name in ("../../etc/cron", "/etc/cron", "file/../../x", "file\\..\\x"):
        with pytest.raises(CheckpointError, match="leaves the archive"):
            load(rebuilt(path, lambda old, data, name=name: (name if old.endswith("/version") else old, data)))
    with pytest.warns(UserWarning, match="Duplicate"), pytest.raises(CheckpointError, match="twice"):
        load(rebuilt(path, lambda old, data: (old.replace("version", "data.pkl") if "/version" in old else old, data)))
    data = path.read_bytes()
    for cut in (10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"cut off|refused|damaged"):
            load(path)
    path.write_bytes(data + b"\0" * 30)
    with pytest.raises(CheckpointError, match="cut off"):
        load(path)


def test_entries_that_overlap_are_refused(tmp_path: Path) -> None:
    """The directory names one entry's bytes a thousand times."""
    path = tmp_path / "overlap.pt"
    body = b"x" * 1000
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}))
        archive.writestr("a/data/0", body)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\1\2")
    record = data[at : data.rindex(b"PK\5\6")]
    end = bytearray(data[data.rindex(b"PK\5\6") :])
    first = data.index(b"PK\1\2")
    records = bytes(data[first:at]) + bytes(record)
    # The second entry's name, given to a record that points at the same header, would be a duplicate; a longer content
    # of the first entry that reaches into the second is not.
    struct.pack_into("<II", data, first + 20, 600, 600)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="overlap"):
        load(path)
    struct.pack_into("<H", end, 8, 60000)
    struct.pack_into("<H", end, 10, 60000)
    path.write_bytes(bytes(data[:first]) + records + bytes(end))
    with pytest.raises(CheckpointError, match="absurdly"):
        load(path)


def pickled_tensor(
    tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...], numel: int, offset: int = 0
) -> Path:
    """A file whose pickle says a tensor of `shape` over a storage of 4 floats."""

    class Storage:
        pass

    class Writer(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if isinstance(obj, Storage) else None

    buffer = io.BytesIO()
    rebuild = torch._utils._rebuild_tensor_v2
    Writer(buffer, protocol=2).dump(Runs(rebuild, Storage(), offset, shape, strides, False, {}))
    path = tmp_path / "tensor.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", buffer.getvalue())
        archive.writestr("a/data/0", b"\0" * 16)
    return path


@pytest.mark.parametrize(
    ("shape", "strides", "numel", "offset"),
    [
        ((1 << 40,), (1,), 4, 0),
        ((1 << 40,), (0,), 4, 0),  # one number, shown a trillion times
        ((1 << 50, 1 << 50), (1, 1), 4, 0),
        ((2, 2), (1 << 40, 1), 4, 0),
        ((4,), (1,), 4, 3),
        ((4,), (1,), 4, -1),
        ((4,), (1,), 1 << 40, 0),
        ((2,) * 40, (1,) * 40, 4, 0),
        ((4,), (1, 1), 4, 0),
        ((-4,), (1,), 4, 0),
    ],
)
def test_absurd_tensors_are_refused_before_memory_is_taken(
    shape: tuple[int, ...], strides: tuple[int, ...], numel: int, offset: int, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError):
        load(pickled_tensor(tmp_path, shape, strides, numel, offset))
    assert load(pickled_tensor(tmp_path, (2, 2), (2, 1), 4)).read().shape == (2, 2)


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A DeepSpeed checkpoint whose model file says something else."""
    folder = tmp_path / "step3"
    shutil.copytree(FIXTURE, folder)
    file = folder / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=True)
    change(state)
    torch.save(state, file)
    return folder


def test_names_that_lead_out_of_a_folder_are_refused(tmp_path: Path) -> None:
    for number, name in enumerate(["../../../root/.bashrc", "/etc/passwd", "..", "a\\b", "new\nline", "nul\0", ""]):

        def change(state: dict[str, Any], name: str = name) -> None:
            state["module"][name] = state["module"].pop("frozen.weight")

        with pytest.raises(CheckpointError, match="refused"):
            open_deepspeed(changed(tmp_path / str(number), change))


def test_a_pointer_that_leads_out_of_a_folder_is_refused(tmp_path: Path) -> None:
    for tag in ("../other", "/etc", "..", "a/b", "", "x" * 2000):
        (tmp_path / "latest").write_text(tag)
        with pytest.raises(CheckpointError):
            find(tmp_path)


def test_a_checkpoint_of_deepspeed_that_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    def grow(state: dict[str, Any]) -> None:
        state["param_shapes"][0]["embed.weight"] = torch.Size([13_000, 7])

    def absurd(state: dict[str, Any]) -> None:
        state["param_shapes"][0]["embed.weight"] = torch.Size([1 << 40, 1 << 40])

    def alias(state: dict[str, Any]) -> None:
        state["shared_params"]["first.weight"] = "embed.weight"

    for number, change in enumerate((grow, absurd, alias)):
        with pytest.raises(CheckpointError):
            open_deepspeed(changed(tmp_path / str(number), change))
    folder = changed(tmp_path / "missing", lambda state: None)
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="files are missing"):
        open_deepspeed(folder)
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="zero_pp_rank_1"):
        open_deepspeed(folder)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_of_any_kind_is_an_error_of_ours(data: st.DataObject) -> None:
    """Bytes of a file or of its pickle, changed at random."""
    content = bytearray((FIXTURE / "zero_pp_rank_0_mp_rank_00_optim_states.pt").read_bytes())
    pickled = content.index(b"\x80\x02}")
    ranges = st.one_of(st.integers(0, len(content) - 1), st.integers(pickled, pickled + 2400))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(ranges)] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file.pt"
        file.write_bytes(content)
        with contextlib.suppress(CheckpointError):
            load(file)


def test_values_of_other_types_are_errors_of_ours(tmp_path: Path) -> None:
    """Each entry of the model file in turn is a number, a text or a list of lists."""
    keys = list(torch.load(FIXTURE / "mp_rank_00_model_states.pt", weights_only=True))
    for number, key in enumerate(keys):
        for value in (7, "text", [[1], [2]]):

            def change(state: dict[str, Any], key: str = key, value: Any = value) -> None:
                state[key] = value

            with contextlib.suppress(CheckpointError):
                open_checkpoint(changed(tmp_path / f"{number} {value}", change))
