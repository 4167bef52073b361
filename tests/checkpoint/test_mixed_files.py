"""An import from DeepSpeed is exact or refused: files of several ranks or saves, damaged files, states that differ."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.checkpoint.test_stages_of_tensors import INFO
from tests.support.deepspeed_files import KEYS, Held, Layer, Layout, named, write, write_stage_3, write_universal
from zeroshard.checkpoint.any_checkpoint import open_checkpoint
from zeroshard.checkpoint.cli import app
from zeroshard.checkpoint.foreign.contents import Contents, Parameter
from zeroshard.checkpoint.foreign.deepspeed_common import scaler_of, step_count
from zeroshard.checkpoint.foreign.inert import Inert, Name
from zeroshard.checkpoint.foreign.stored import InMemory
from zeroshard.checkpoint.foreign.torchzip import load
from zeroshard.checkpoint.native import write_native
from zeroshard.errors import CheckpointError

FIXTURES = Path(__file__).parent / "deepspeed"
DATA = Layout((3,), 1, 2, marked=False)  # one stage on 2 data ranks
PIPELINE = Layout((2, 2), 1, 2)
OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
Change = Callable[[dict[str, Any]], object]


def held(seed: int, *shape: int, cut: str = "whole") -> Held:
    generator = torch.Generator().manual_seed(seed)
    return Held({key: torch.randn(shape, generator=generator) for key in KEYS}, cut)


def _layers(count: int = 3) -> list[Layer]:
    """Layers of the same shapes."""
    return [Layer({"weight": held(10 * n, 6, 5, cut="rows"), "norm": held(10 * n + 1, 6)}) for n in range(count)]


def all_of(contents: Contents) -> dict[str, torch.Tensor]:
    return {
        f"{name}|{key}": value.read()
        for name, one in contents.parameters.items()
        for key, value in {"fp32": one.weight, **one.moments}.items()
    }


def same(contents: Contents, held: Mapping[str, Held]) -> None:
    found = all_of(contents)
    assert found.keys() == {f"{name}|{key}" for name in held for key in KEYS}
    assert all(torch.equal(found[f"{name}|{key}"], one.values[key]) for name, one in held.items() for key in KEYS)


def changed(path: Path, change: Change) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def _swapped(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _import(source: Path, out: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["import", str(source), str(out), *more], env={"NO_COLOR": "1"})


SWAPPED = {
    "data ranks": ("checkpoints/zero1_bf16_optimizer", "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"),
    "tensor-parallel ranks": ("divided/tensors", "zero_pp_rank_0_mp_rank_0{}_optim_states.pt"),
    "stages of tensor-parallel ranks": ("divided/stages_of_tensors", "zero_pp_rank_1_mp_rank_0{}_optim_states.pt"),
    "experts": ("divided/experts", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"),
    "experts over data ranks": ("divided/experts_apart", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"),
}


@pytest.mark.parametrize("case", SWAPPED)
def test_files_that_ranks_have_exchanged_are_refused(case: str, tmp_path: Path) -> None:
    fixture, name = SWAPPED[case]
    folder = shutil.copytree(FIXTURES / fixture / "step3", tmp_path / "step3")
    before = all_of(open_checkpoint(folder))
    _swapped(folder / name.format(0), folder / name.format(1))
    result = _import(folder, tmp_path / "own")
    with pytest.raises(CheckpointError, match=r"the master weights of .* do not round to the weights of the forward"):
        raise result.exception or AssertionError(result.output)
    assert not list(tmp_path.glob("own/*"))
    told = _import(folder, tmp_path / "own", "--masters-differ")
    assert told.exit_code == 0, told.output
    after = all_of(open_checkpoint(tmp_path / "own"))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_stages_of_the_same_shapes_that_were_exchanged_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "step7", _layers(4), PIPELINE, None)
    same(open_checkpoint(source), named(_layers(4)))
    for rank in range(2):
        stages = [source / f"zero_pp_rank_{rank}_mp_rank_0{stage}_optim_states.pt" for stage in range(2)]
        _swapped(*stages)
    with pytest.raises(CheckpointError, match=r"master weights of '0.weight' .* copy the checkpoint again"):
        all_of(open_checkpoint(source))


def test_an_optimizer_of_the_save_before_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "step7", _layers(), DATA, None)
    earlier = [Layer({**one.parameters, "norm": held(99, 6)}) for one in _layers()]
    before = write(tmp_path / "step6", earlier, DATA, None)
    for path in before.glob("*optim_states.pt"):
        path.replace(source / path.name)
    with pytest.raises(CheckpointError, match=r"master weights of '0.norm' .* do not round"):
        all_of(open_checkpoint(source))


def test_layers_that_were_exchanged_are_refused(tmp_path: Path) -> None:
    layers = [*_layers(3), Layer({"other": held(7, 4)})]
    source = write(tmp_path / "step7", layers, PIPELINE, None)
    name = "layer_{:02d}-model_00-model_states.pt"
    _swapped(source / name.format(0), source / name.format(1))
    with pytest.raises(CheckpointError, match="do not round"):
        all_of(open_checkpoint(source))
    _swapped(source / name.format(0), source / name.format(3))
    with pytest.raises(CheckpointError, match=r"layer_00\*_states.pt have no '0.weight' of shape \[6, 5\]"):
        open_checkpoint(source)


def test_a_stage_that_was_copied_over_another_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "step7", _layers(4), PIPELINE, None)
    shutil.copy(source / "mp_rank_00_model_states.pt", source / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match=r"'0.weight' is on several stages, though it is of no tied layer"):
        open_checkpoint(source)


def test_one_of_two_tensor_parallel_ranks_is_no_checkpoint(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "divided" / "tensors", tmp_path / "tensors") / "step3"
    for path in folder.glob("*mp_rank_01_*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="holds the files of 1 model-parallel ranks, of 2 that mp_rank_00"):
        open_checkpoint(folder)


def _first(state: dict[str, Any]) -> dict[str, Any]:
    """The state of the first flat group in an optimizer's file."""
    base = state["optimizer_state_dict"]
    return base.get("base_optimizer_state", base.get("optimizer_state_dict"))["state"][0]


def _options(state: dict[str, Any]) -> dict[str, Any]:
    base = state["optimizer_state_dict"]
    return base.get("base_optimizer_state", base.get("optimizer_state_dict"))["param_groups"][0]


DIFFERENT: dict[str, tuple[Change, str]] = {
    "another step": (lambda state: _first(state).update(step=torch.tensor(8.0)), "the step count of flat group 0 is"),
    "no step": (lambda state: _first(state).pop("step"), "the step count of flat group 0 is"),
    "a step that is none": (lambda state: _first(state).update(step=float("nan")), "a step count is nan"),
    "a step in words": (lambda state: _first(state).update(step="7"), "a step count is 7"),
    "no moment": (lambda state: _first(state).pop("exp_avg_sq"), "the state of flat group 0 is"),
    "no state": (lambda state: _first(state).clear(), "flat group 0 is"),
    "another rate": (lambda state: _options(state).update(lr=0.5), "param_groups is"),
    "a longer moment": (
        lambda state: _first(state).update(exp_avg=torch.ones(1000)),
        "exp_avg of rank . has 1000 elem",
    ),
    "a moment in one number": (
        lambda state: _first(state).update(exp_avg=torch.ones(())),
        r"exp_avg .* has shape \[\]",
    ),
    "a moment of rows": (
        lambda state: _first(state).update(exp_avg=_first(state)["exp_avg"][None]),
        r"exp_avg of group 0 has shape \[1, ",
    ),
    "another number of ranks": (
        lambda state: state["optimizer_state_dict"].update(partition_count=[1]),
        "partition_count is|was saved by",
    ),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("case", DIFFERENT)
def test_data_ranks_must_agree(case: str, stage: int, rank: int, tmp_path: Path) -> None:
    change, said = DIFFERENT[case]
    if stage == 1:
        source = write(tmp_path / "step7", _layers(), DATA, None)
    else:
        source = write_stage_3(tmp_path / "step7", [one.parameters for one in _named_layers()], 2)
    changed(next(source.glob(f"*_rank_{rank}_mp_rank_00_optim_states.pt")), change)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(source)


def _named_layers() -> list[Layer]:
    """Layers whose parameters have names of the whole model."""
    return [Layer({f"{n}.{key}": held for key, held in one.parameters.items()}) for n, one in enumerate(_layers())]


@pytest.mark.parametrize("data", [1, 2, 3, 7])
def test_stage_3_is_read_as_one_process_has_it(data: int, tmp_path: Path) -> None:
    groups = [one.parameters for one in _named_layers()]
    source = write_stage_3(tmp_path / "step7", groups, data)
    same(open_checkpoint(source), {name: held for group in groups for name, held in group.items()})


def test_an_optimizer_of_stage_3_that_was_copied_over_another_rank_is_refused(tmp_path: Path) -> None:
    source = write_stage_3(tmp_path / "step7", [one.parameters for one in _named_layers()], 3)
    name = f"bf16_{OPTIMIZER}"
    shutil.copy(source / name.format(0), source / name.format(2))
    with pytest.raises(CheckpointError, match="the optimizer files of ranks 0 and 2 have the same weights"):
        open_checkpoint(source)


def test_norms_of_stage_3_that_are_not_trained_yet_may_be_the_same_on_all_ranks(tmp_path: Path) -> None:
    norm = {"norm.weight": torch.ones(32), "norm.bias": torch.zeros(32)}
    new = {name: Held(dict.fromkeys(KEYS, value)) for name, value in norm.items()}
    groups = [new, {"weight": held(1, 6, 8)}]
    same(open_checkpoint(write_stage_3(tmp_path / "step0", groups, 2)), {**groups[0], **groups[1]})


def test_model_files_of_several_saves_are_refused_where_they_have_frozen_weights(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "checkpoints" / "zero3" / "step3", tmp_path / "step3")
    changed(folder / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda state: state.update(global_steps=2))
    with pytest.raises(
        CheckpointError, match=r"\(global_steps, global_samples\) of zero_pp_rank_1_mp_rank_00_model_st"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_do_not_fill_the_partitions_are_refused(stage: int, tmp_path: Path) -> None:
    if stage == 1:
        source = write(tmp_path / "step7", _layers(), DATA, None)
        path = source / "mp_rank_00_model_states.pt"
    else:
        source = write_stage_3(tmp_path / "step7", [one.parameters for one in _named_layers()], 2)
        path = source / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    changed(path, lambda state: state["param_shapes"][0].popitem())
    with pytest.raises(CheckpointError, match="model files and optimizer files are not of one save"):
        open_checkpoint(source)


def test_a_shape_that_the_weights_do_not_have_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "checkpoints" / "zero1" / "step3", tmp_path / "step3")
    turned = {"embed.weight": torch.Size([7, 13])}
    changed(folder / "mp_rank_00_model_states.pt", lambda state: state["param_shapes"][0].update(turned))
    with pytest.raises(CheckpointError, match=r"shape \[7, 13\] in param_shapes, but its weights have \[13, 7\]"):
        open_checkpoint(folder)


def _flipped(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_of_a_tensor_is_refused_though_torch_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "tensor.pt"
    torch.save({"value": torch.full((3000,), 1.5)}, path)
    at = path.read_bytes().index(b"\0\0\xc0\x3f" * 100) + 400
    _flipped(path, at)
    assert torch.load(path, weights_only=True)["value"].unique().numel() == 2
    value = load(path)["value"]
    for read in (value.read, lambda: value.read_flat(0, 1)):
        with pytest.raises(CheckpointError, match=r"tensor.pt is damaged: bytes .* have the checksum"):
            read()


def test_a_flipped_bit_of_the_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"lr": 0.015625}, path)
    _flipped(path, path.read_bytes().index(b"G\x3f\x90") + 4)
    assert torch.load(path, weights_only=True)["lr"] != 0.015625
    with pytest.raises(CheckpointError, match=r"state.pt is damaged: bytes .* have the checksum"):
        load(path)


def test_a_file_that_was_saved_without_checksums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"value": torch.arange(9)}, tmp_path / "tensor.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert load(tmp_path / "tensor.pt")["value"].read().tolist() == list(range(9))


UNIVERSAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "no moment": (lambda at: (at / "exp_avg_sq.pt").unlink(), "has files of moments"),
    "no step": (lambda at: (at / "step.pt").unlink(), "has step counts"),
    "another step": (lambda at: torch.save(torch.tensor(8.0), at / "step.pt"), "has step counts"),
    "a step that is none": (lambda at: torch.save(torch.tensor(-1.0), at / "step.pt"), "a step count is -1.0"),
    "rows of another save": (
        lambda at: [torch.save({"param": torch.zeros(5, 5)}, at / f"{key}.pt") for key in KEYS],
        r"has shape \[5, 5\] in the folder zero, but .* \[\[3, 5\], \[3, 5\]\], make \[6, 5\]",
    ),
    "half a precision": (
        lambda at: torch.save({"param": torch.zeros(6, 5).half()}, at / "fp32.pt"),
        r"1.weight has dtypes \['torch.float16'",
    ),
    "integers": (
        lambda at: torch.save({"param": torch.zeros(6, 5, dtype=torch.int32)}, at / "exp_avg.pt"),
        r"1.weight has dtypes \['torch.float32', 'torch.int32'",
    ),
}


@pytest.mark.parametrize("case", UNIVERSAL)
def test_files_of_a_universal_checkpoint_must_fit_together(case: str, tmp_path: Path) -> None:
    change, said = UNIVERSAL[case]
    info = {**INFO, "tp_replicated_parameter_patterns": [r"\d+\.norm"]}
    source = write_universal(tmp_path / "step7", _layers(), Layout((3,), 2, 2), info)
    same(open_checkpoint(source), named(_layers()))
    change(source / "zero" / "1.weight")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(source)


def test_universal_weights_that_are_not_those_of_the_model_file_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "checkpoints" / "universal_from_zero1" / "step3", tmp_path / "step3")
    home = folder / "zero" / "embed.weight"
    _swapped(home / "fp32.pt", home / "exp_avg.pt")
    with pytest.raises(CheckpointError, match=r"master weights of 'embed.weight' .* do not round"):
        all_of(open_checkpoint(folder))


def test_moments_that_no_model_file_knows_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "checkpoints" / "universal_from_zero1" / "step3", tmp_path / "step3")
    changed(folder / "mp_rank_00_model_states.pt", lambda state: state["param_shapes"][0].pop("second.weight"))
    with pytest.raises(CheckpointError, match=r"exp_avg.*pt, but no model file says that 'second.weight' is trained"):
        open_checkpoint(folder)


def _zero1(tmp_path: Path, change: Change) -> Path:
    folder = shutil.copytree(FIXTURES / "checkpoints" / "zero1" / "step3", tmp_path / "step3")
    changed(folder / "mp_rank_00_model_states.pt", change)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state["module"].update({"head.weight": torch.ones(13, 7).bfloat16()}), "but they differ"),
        (lambda state: state["shared_params"].update({"norm.weight": "embed.weight"}), "but they differ"),
        (lambda state: state.pop("global_steps"), "it has no global_steps"),
        (lambda state: state.update(global_steps=10**5000), "global_steps is a number of 16610 bits"),
        (lambda state: state.update(global_steps=float("nan")), "global_steps is nan"),
        (lambda state: state.update(mp_world_size=2), "holds the files of 1 model-parallel ranks, of 2"),
    ],
)
def test_a_model_file_that_contradicts_itself_is_refused(change: Change, said: str, tmp_path: Path) -> None:
    folder = _zero1(tmp_path, change)
    result = _import(folder, tmp_path / "own")
    with pytest.raises(CheckpointError, match=said):
        raise result.exception or AssertionError(result.output)


def test_a_buffer_can_not_be_another_name_of_a_parameter() -> None:
    value = InMemory(torch.ones(2))
    with pytest.raises(CheckpointError, match="'seen' can't be another name of 'weight'"):
        Contents("test", {"weight": Parameter("weight", value)}, {"seen": value}, {"seen": "weight"})


def test_what_could_not_be_opened_is_not_published(tmp_path: Path) -> None:
    value = InMemory(torch.ones(2))
    aliases: dict[str, str] = {}
    contents = Contents("test", {"weight": Parameter("weight", value)}, {"seen": value}, aliases)
    aliases["seen"] = "weight"  # after all checks but that of a reader
    with pytest.raises(CheckpointError, match="'seen' can't be another name of 'weight'"):
        write_native(contents, tmp_path / "own", "step1")
    assert not list((tmp_path / "own").iterdir())


def test_a_loss_scaler_has_numbers() -> None:
    of, state = Name("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"), {"cur_scale": 8.0, "dynamic": True}
    found = scaler_of(Inert(of, state={**state, "cur_iter": 9, "last_overflow_iter": 4, "cur_hysteresis": 2}))
    assert found is not None
    assert (found.scale, found.since_overflow, found.hysteresis) == (8.0, 4, 2)
    for wrong in ({"cur_hysteresis": "x"}, {"cur_iter": float("nan")}, {"cur_scale": float("inf")}):
        with pytest.raises(CheckpointError, match="the loss scale"):
            scaler_of(Inert(of, state={**state, **wrong}))


@pytest.mark.parametrize("value", [7, 7.0, torch.tensor(7), torch.tensor([7.0])])
def test_step_counts_are_whole_numbers(value: Any, tmp_path: Path) -> None:
    torch.save({"step": value}, tmp_path / "step.pt")
    assert step_count(load(tmp_path / "step.pt")["step"], tmp_path) == 7.0


def test_a_tag_that_only_deepspeed_allows_is_found(tmp_path: Path) -> None:
    source = write(tmp_path / "epoch=3-step=7", _layers(), DATA, None)
    same(open_checkpoint(tmp_path, "epoch=3-step=7"), named(_layers()))
    with pytest.raises(CheckpointError, match=r"no file `latest`, but epoch=3-step=7: give --tag"):
        open_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("step8")
    with pytest.raises(
        CheckpointError, match="latest names 'step8', but there is no such folder beside it; give --tag"
    ):
        open_checkpoint(source.parent)


@pytest.mark.parametrize("tag", [False, True])
def test_an_import_into_the_folder_that_it_reads_is_refused(tag: bool, tmp_path: Path) -> None:
    source = write(tmp_path / "all" / "step7", _layers(), DATA, None)
    (tmp_path / "all" / "latest").write_text("step7")
    result = _import(source if tag else source.parent, tmp_path / "all", "--as", "own")
    with pytest.raises(ValueError, match=r"holds the checkpoint to import .* give another folder to write into"):
        raise result.exception or AssertionError(result.output)
    assert (tmp_path / "all" / "latest").read_text() == "step7"
    assert _import(source, tmp_path / "all" / "own").exit_code == 0


def test_an_import_that_is_killed_leaves_nothing_and_runs_again(tmp_path: Path) -> None:
    source = write(tmp_path / "step7", [Layer({"weight": held(1, 3000, 3000)})], Layout((1,), 1, 1, marked=False), None)
    command = [sys.executable, "-m", "zeroshard", "checkpoint", "import", str(source), str(tmp_path / "own"), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob("own/.*partial/model*")):
        pass
    process.kill()
    assert process.wait() < 0, "it was done before it was killed"
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "own")
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["steps"] == 7
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["global_step7", "latest"]


WRONG_CUTS: dict[str, tuple[bytes | dict[str, Any], str]] = {
    "deep": (b"[" * 100_000, "nested too deeply"),
    "a vocabulary in words": ({"original_vocab_size": "6"}, "original_vocab_size in .* is '6', not a number of words"),
    "no vocabulary": ({"original_vocab_size": 0}, "original_vocab_size in .* is '0', not a number of words"),
    "more words than rows": (
        {"original_vocab_size": 7, "vocabulary_parameter_patterns": [".*weight"]},
        "'0.weight' has 6 rows, fewer than original_vocab_size of .*, 7",
    ),
    "a number as pattern": ({"vocabulary_parameter_patterns": [3]}, "a pattern in .* is '3', no text"),
    "columns of other rows": (
        {"parameter_with_row_parallelism_patterns": [".*weight"]},
        r"'0.weight': parts of shapes \[\[2, 5\], \[2, 5\], \[1, 5\]\] do not fit together by columns",
    ),
    "widths in a list": (
        {
            "parameter_with_sub_params": [{"patterns": ["a"], "shape": [6, 5], "partition_dim": 0}],
            "sub_param_shard_widths": [1],
        },
        "sub_param_shard_widths in .* is '.1.', not an object",
    ),
}


@pytest.mark.parametrize("case", WRONG_CUTS)
def test_a_file_on_cuts_that_contradicts_the_checkpoint_is_refused(case: str, tmp_path: Path) -> None:
    content, said = WRONG_CUTS[case]
    rows = 5 if "columns" in case else 6
    layers = [Layer({"weight": held(1, rows, 5, cut="rows"), "norm": held(2, 6)})]
    source = write(tmp_path / "step7", layers, Layout((1,), 3, 1), None)
    cuts = tmp_path / "cuts.json"
    if isinstance(content, dict):
        content = json.dumps({"tp_replicated_parameter_patterns": [".*norm"], **content}).encode()
    cuts.write_bytes(content)
    result = _import(source, tmp_path / "own", "--universal-checkpoint-info", str(cuts))
    with pytest.raises(ValueError, match=said):
        raise result.exception or AssertionError(result.output)
    assert not list(tmp_path.glob("own/*"))


def test_an_empty_tag_to_write_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "step7", _layers(), DATA, None)
    result = _import(source, tmp_path / "own", "--as", "")
    with pytest.raises(CheckpointError, match="checkpoint tag ''"):
        raise result.exception or AssertionError(result.output)


def test_a_pointer_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    """Its first byte can't be read, be it by an administrator, to whom permissions do not apply."""
    (tmp_path / "latest").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"latest can't be read|Input/output error"):
        open_checkpoint(tmp_path)
