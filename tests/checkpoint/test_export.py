"""What is exported is loaded by the libraries that it is for, bit for bit, and the whole is never in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.checkpoint.test_deepspeed import opened, truth
from zeroshard.checkpoint.export.dcp import export_dcp
from zeroshard.checkpoint.export.hf import INDEX, export_hf, parse_size
from zeroshard.checkpoint.foreign.contents import Contents, Parameter
from zeroshard.checkpoint.foreign.dcp import open_dcp
from zeroshard.checkpoint.foreign.stored import InMemory
from zeroshard.errors import CheckpointError, UsageError


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / INDEX).read_text())
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(folder / name)
        assert all(index["weight_map"][tensor] == name for tensor in part)
        found |= part
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3"])
def test_weights_of_deepspeed_export_in_compute_dtype_or_as_masters(case: str, tmp_path: Path) -> None:
    expected = truth(case)
    contents = opened(case)
    done = export_hf(contents, tmp_path / "low", max_shard=300)
    assert len(done.files) > 1
    low = loaded(tmp_path / "low")
    export_hf(contents, tmp_path / "full", dtype=torch.float32)
    full = loaded(tmp_path / "full")
    assert low.keys() == full.keys() == contents.parameters.keys() | contents.buffers.keys()
    assert "head.weight" not in low
    for name in contents.parameters:
        assert torch.equal(low[name], expected[f"{name}|compute"]), name
        assert low[name].dtype == expected[f"{name}|compute"].dtype
        assert torch.equal(full[name], expected.get(f"{name}|fp32", expected[f"{name}|compute"].float()))


def test_transformers_loads_an_export_and_ties_it_again(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for tied in (True, False):
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=40,
            tie_word_embeddings=tied,
        )
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        state = model.state_dict()
        aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        parameters = {
            name: Parameter(name, InMemory(value), compute=torch.bfloat16)
            for name, value in state.items()
            if name not in aliases
        }
        contents = Contents("a test", parameters, aliases=aliases)
        out = tmp_path / str(tied)
        model.config.save_pretrained(tmp_path / "config")
        for dtype, folder in [(torch.float32, out / "full")] if tied else [(None, out / "low")]:
            export_hf(contents, folder, dtype=dtype, max_shard=4000, config=tmp_path / "config" / "config.json")
            again, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", output_loading_info=True
            )
            assert not info["missing_keys"]
            assert not info["unexpected_keys"]
            assert again.dtype == (dtype or torch.bfloat16)
            for name, value in again.state_dict().items():
                assert torch.equal(value, state[name].to(dtype or torch.bfloat16)), name
            assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def test_an_export_is_whole_or_not_there(tmp_path: Path) -> None:
    class Broken(InMemory):
        def read_flat(self, start: int, stop: int) -> torch.Tensor:
            raise CheckpointError("this tensor can't be read")

    good = Parameter("good", InMemory(torch.ones(4)))
    contents = Contents("a test", {"good": good, "bad": Parameter("bad", Broken(torch.ones(4)))})
    with pytest.raises(CheckpointError, match="this tensor"):
        export_hf(contents, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(UsageError, match="not empty"):
        export_hf(Contents("a test", {"good": good}), tmp_path / "out")
    with pytest.raises(UsageError, match="not empty"):
        export_dcp(Contents("a test", {"good": good}), tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "keep"


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_size(text) for text in ("5GB", "200 MB", "1gib", "7", 9)] == [5 * 10**9, 2 * 10**8, 1 << 30, 7, 9]
    for text in ("", "GB", "-1", "1.5GB", "0"):
        with pytest.raises(UsageError, match="size"):
            parse_size(text)


@pytest.mark.parametrize("flat", [False, True])
def test_plain_dcp_is_loaded_by_torch_and_opened_again(flat: bool, tmp_path: Path) -> None:
    contents = opened("zero3")
    export_dcp(contents, tmp_path / "dcp", flat)
    expected = truth("zero3")
    target = {name: torch.zeros_like(parameter.weight.read()) for name, parameter in contents.parameters.items()}
    target["head.weight"] = torch.zeros(13, 7)
    moments = {name: torch.zeros(p.shape) for name, p in contents.parameters.items() if p.moments}
    state = (
        {**target, "optimizer": {f"state.{name}.exp_avg": value for name, value in moments.items()}}
        if flat
        else {"model": target, "optim": {"state": {name: {"exp_avg": value} for name, value in moments.items()}}}
    )
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, value in target.items():
        stored = contents.aliases.get(name, name)
        assert torch.equal(value, expected.get(f"{stored}|fp32", expected[f"{stored}|compute"])), name
    for name, value in moments.items():
        assert torch.equal(value, expected[f"{name}|exp_avg"]), name
    again = open_dcp(tmp_path / "dcp")
    assert again.parameters.keys() == contents.parameters.keys() | {"mean"}  # DCP does not tell buffers apart
    assert again.aliases == contents.aliases
    assert again.buffers.keys() == {"seen"}
    assert [set(group.names) for group in again.groups] == [set(group.names) for group in contents.groups]
    for group, other in zip(again.groups, contents.groups, strict=True):
        assert group.options == other.options
    for name, parameter in again.parameters.items():
        if name in contents.parameters:
            assert torch.equal(parameter.weight.read(), contents.parameters[name].weight.read())
            assert parameter.moments.keys() == contents.parameters[name].moments.keys()
            assert parameter.step == contents.parameters[name].step


MEASURE = """
import json, re, sys
from pathlib import Path
import torch
from zeroshard.checkpoint.export.dcp import export_dcp
from zeroshard.checkpoint.export.hf import export_hf
from zeroshard.checkpoint.foreign.deepspeed import find, open_deepspeed
from zeroshard.checkpoint.foreign.stored import InMemory
from zeroshard.checkpoint.foreign.contents import Contents, Group, Parameter
from zeroshard.checkpoint.native import write_native

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
found = {}
for kind, export in (("hf", export_hf), ("dcp", export_dcp), ("import", lambda c, p: write_native(c, p, "tag"))):
    warm = Parameter("x", InMemory(torch.ones(100, 10)), {"exp_avg": InMemory(torch.ones(100, 10))}, step=1.0)
    export(Contents("warm up", {"x": warm}, groups=(Group(("x",), {"lr": 1.0}),)), out / "warm" / kind)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    export(open_deepspeed(find(folder)), out / kind)
    found[kind] = status("VmHWM") - before
print(json.dumps(found))
"""


def big_checkpoint(folder: Path, count: int, rows: int) -> None:
    """A stage 3 checkpoint of two ranks, laid out as DeepSpeed does: `count` matrices of rows x 1024, in bf16."""
    folder.mkdir()
    shapes = {f"layer.{index}.weight": torch.Size([rows, 1024]) for index in range(count)}
    common = {
        "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes},
        "buffer_names": [],
        "param_shapes": [shapes],
        "shared_params": {},
        "ds_version": "0.19.8",
        "global_steps": 1,
    }
    half = count * rows * 1024 // 2
    for rank in range(2):
        torch.save(common, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        state = {key: torch.full((half,), float(rank)) for key in ("exp_avg", "exp_avg_sq")}
        inner = {"state": {0: state}, "param_groups": [{"lr": 1.0, "params": [0]}]}
        held = {
            "zero_stage": 3,
            "partition_count": 2,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": [torch.full((half,), 0.5)],
        }
        torch.save({"optimizer_state_dict": held}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def test_export_and_import_need_memory_for_two_of_the_largest_tensors(tmp_path: Path) -> None:
    """Of 64 MiB of weights in 16 MiB tensors (192 MiB with moments), at most 32 MiB and some for the interpreter."""
    big_checkpoint(tmp_path / "ds", count=4, rows=4096)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "ds"), str(tmp_path)]
    extra = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert all(count < (32 + 16) << 20 for count in extra.values()), extra
