"""A pretrained model is sharded as it is read: right values, and no more memory than a share and one tensor."""

from __future__ import annotations

import copy
import io
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.checkpoint.safetensors_folder import SafetensorsFolder
from zeroshard.errors import CheckpointError, UsageError

MIB = 2**20
WIDTH, DEPTH = 1024, 16


class Net(nn.Module):
    """Blocks, a tied head, a norm whose running values are buffers, and a buffer that no file has."""

    def __init__(self, width: int = 7, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 3.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(self.norm(x) * self.scale)


def _write(folder: Path, state: dict[str, torch.Tensor], files: int = 1) -> None:
    """The state in as many files, with an index where there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(state)
    table = {}
    for number in range(files):
        name = "model.safetensors" if files == 1 else f"model-{number}.safetensors"
        part = {key: state[key] for key in names[number::files]}
        table.update(dict.fromkeys(part, name))
        save_file({key: value.contiguous() for key, value in part.items()}, folder / name)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def _trains(rank: int, world: int, base: str) -> None:
    torch.manual_seed(5)
    whole = Net()
    loaded = zeroshard.from_pretrained(Net, Path(base, "net"))
    assert loaded.made == ()
    assert loaded.unused == ("other",)
    model = loaded.model
    assert isinstance(model, Net)
    assert model.head.weight is model.embed.weight
    assert {parameter.numel() for parameter in model.parameters()} == {0}
    assert model.get_buffer("norm.running_mean").tolist() == [0.5] * 7
    assert model.get_buffer("scale").tolist() == [3.0]
    with zeroshard.GatheredParameters(model.parameters()):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name
        ordinary = copy.deepcopy(model)
    assert torch.equal(ordinary.get_parameter("blocks.0.weight"), whole.get_parameter("blocks.0.weight"))
    with pytest.raises(UsageError, match="can't be pickled"):
        torch.save(model, io.BytesIO())
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight
    with zeroshard.GatheredParameters(twin.parameters(), modifier_rank=0), torch.no_grad():
        twin.get_parameter("blocks.0.weight").zero_()
    with zeroshard.GatheredParameters([*twin.parameters(), *model.parameters()]):
        assert not twin.get_parameter("blocks.0.weight").any()
        assert torch.equal(twin.get_parameter("blocks.1.weight"), whole.get_parameter("blocks.1.weight"))
        assert torch.equal(model.get_parameter("blocks.0.weight"), whole.get_parameter("blocks.0.weight"))
    sharded, _ = zeroshard.shard(model, plan=zeroshard.Recipe(sharding=zeroshard.STAGES[3]))
    whole.get_buffer("norm.running_mean").fill_(0.5)
    ids = torch.arange(6)
    assert torch.equal(sharded.eval()(ids), whole.eval()(ids))
    zeroshard.close(sharded)

    narrow = zeroshard.from_pretrained(Net, Path(base, "net"), dtype=torch.bfloat16).model
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    torch.manual_seed(9)
    headless = zeroshard.from_pretrained(
        Net, Path(base, "encoder"), rename=lambda name: f"encoder.{name}", new=("norm.",)
    )
    assert set(headless.made) == {name for name in Net().state_dict() if name.startswith("norm.")}
    with zeroshard.GatheredParameters(headless.model.parameters()):
        assert torch.equal(headless.model.get_parameter("norm.weight"), torch.ones(7))
        assert torch.equal(headless.model.get_parameter("blocks.1.weight"), whole.get_parameter("blocks.1.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 5 of the model's tensors .norm\.weight.*`rename`"):
        zeroshard.from_pretrained(Net, Path(base, "encoder"), rename=lambda name: f"encoder.{name}")
    with pytest.raises(CheckpointError, match=r"has shape \(11, 7\), the model's has \(11, 8\)"):
        zeroshard.from_pretrained(lambda: Net(8), Path(base, "net"))


def _peak_of_loading(rank: int, world: int, folder: str) -> int:
    zeroshard.from_pretrained(lambda: Net(8, 2), Path(folder, "small"))  # what the first use of anything costs
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmHWM")
    loaded = zeroshard.from_pretrained(lambda: Net(WIDTH, DEPTH), Path(folder, "large"))
    after = _status("VmHWM")
    assert loaded.made == ()
    return after - before


def _status(key: str) -> int:
    """A line of this process's memory status, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def test_each_rank_has_the_values_of_the_files_and_trains_on(tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = {**Net().state_dict(), "norm.running_mean": torch.full((7,), 0.5)}
    del state["head.weight"]
    _write(tmp_path / "net", {**state, "other": torch.ones(2)}, files=2)
    _write(tmp_path / "encoder", {f"encoder.{name}": value for name, value in state.items() if "norm" not in name})
    run_ranks(2, _trains, str(tmp_path))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks of memory can't be reset here")
def test_no_rank_holds_more_than_its_share_and_one_tensor(tmp_path: Path) -> None:
    for name, net in (("small", Net(8, 2)), ("large", Net(WIDTH, DEPTH))):
        _write(tmp_path / name, {key: value for key, value in net.state_dict().items() if key != "head.weight"})
    whole, largest = 4 * DEPTH * WIDTH * WIDTH, 4 * WIDTH * WIDTH
    peaks = run_ranks(2, _peak_of_loading, str(tmp_path))
    assert max(peaks) < whole / 2 + largest + 6 * MIB, peaks
    assert max(peaks) < 0.8 * whole


def test_what_is_no_safetensors_folder_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no safetensors file"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        SafetensorsFolder(tmp_path)
    _write(tmp_path, {"a": torch.arange(8.0)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="tensor 'a' does not fit its place"):
        SafetensorsFolder(tmp_path)


HEADERS = [
    b"",
    b"no json",
    b"\xff\xfe",
    b"[1]",
    b'{"a": 1}',
    b'{"a": {"dtype": "F32", "shape": [2]}}',
    b'{"a": {"dtype": "F32", "shape": null, "data_offsets": [0, 8]}}',
    b'{"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}',
    b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}',
    b'{"a": {"dtype": 3, "shape": [2], "data_offsets": [0, 8]}}',
    b"[" * 100_000,
    b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 1}',
    b'{"a": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}, '
    b'"b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}',
    b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, '
    b'"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
    b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 8]}}',
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_that_is_none_is_one_error_that_names_the_file(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"{",
            b"[]",
            b"\xff",
            b"{}",
            b'{"weight_map": 3}',
            b'{"weight_map": {"a": 3}}',
            b'{"weight_map": {"a": ".."}}',
        ),
        b'{"weight_map": {"a": "%s.safetensors"}}' % (b"x" * 5000),
        b'{"weight_map": {"a": 1, "a": 2}}',
    ],
)
def test_an_index_that_is_none_is_one_error(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        SafetensorsFolder(tmp_path)


def test_an_index_reaches_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    _write(tmp_path / "other", {"a": torch.ones(2)})
    (tmp_path / "own").mkdir()
    for name in ("../other/model.safetensors", str(tmp_path / "other" / "model.safetensors")):
        (tmp_path / "own" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match="files beside it are read"):
            SafetensorsFolder(tmp_path / "own")


def test_what_builds_no_model_and_what_is_no_dtype_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, {"weight": torch.ones(2, 2)})
    with pytest.raises(UsageError, match="it must return the model"):
        zeroshard.from_pretrained(lambda: None, tmp_path)  # type: ignore[arg-type,return-value]
    for dtype in (torch.int64, "bfloat16"):
        with pytest.raises(UsageError, match="a floating-point torch dtype"):
            zeroshard.from_pretrained(lambda: nn.Linear(2, 2, bias=False), tmp_path, dtype=dtype)  # type: ignore[arg-type]


def test_the_index_decides_which_of_two_files_a_tensor_is_in(tmp_path: Path) -> None:
    for number in range(2):
        save_file({"weight": torch.full((2, 2), float(number))}, tmp_path / f"model-{number}.safetensors")
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: holds 'weight', and so does model-0"):
        SafetensorsFolder(tmp_path)
    for number in range(2):
        table = {"weight_map": {"weight": f"model-{number}.safetensors", "bias": f"model-{1 - number}.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
        with pytest.raises(CheckpointError, match=rf"'bias' in model-{1 - number}\.safetensors, which does"):
            SafetensorsFolder(tmp_path)
        save_file(
            {"weight": torch.full((2, 2), 1.0 - number), "bias": torch.zeros(2)},
            tmp_path / f"model-{1 - number}.safetensors",
        )
        loaded = zeroshard.from_pretrained(lambda: nn.Linear(2, 2), tmp_path)
        with zeroshard.GatheredParameters(loaded.model.parameters()):
            assert torch.equal(loaded.model.get_parameter("weight"), torch.full((2, 2), float(number)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_numbers_of_another_kind_are_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2).to(dtype), "bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: 'weight' is {dtype}, the model's 'weight' is"):
        zeroshard.from_pretrained(lambda: nn.Linear(2, 2), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_floats_of_another_width_are_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2, dtype=dtype), "bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    loaded = zeroshard.from_pretrained(lambda: nn.Linear(2, 2), tmp_path)
    with zeroshard.GatheredParameters(loaded.model.parameters()):
        assert torch.equal(loaded.model.get_parameter("weight"), torch.ones(2, 2))
