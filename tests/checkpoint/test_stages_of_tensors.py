"""A DeepSpeed checkpoint of stages with tensor-parallel ranks becomes the checkpoint of one process, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.support.deepspeed_files import KEYS, Held, Layer, Layout, named, write, write_universal
from zeroshard.checkpoint.any_checkpoint import open_checkpoint
from zeroshard.checkpoint.cli import app
from zeroshard.checkpoint.foreign.contents import Contents
from zeroshard.errors import CheckpointError

WORDS, PADDED, HIDDEN, INNER, QUERIES = 13, 15, 7, 9, (6, 2, 2)
INFO: dict[str, Any] = {
    "original_vocab_size": WORDS,
    "vocabulary_parameter_patterns": [r"tied_modules.embedding.weight"],
    "tp_replicated_parameter_patterns": [r"\d+\.norm\.weight", r"\d+\.down\.bias"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.down\.weight"],
}
LAYOUT = Layout((3, 3), 2, 2)
LAYOUTS = {
    "2 stages, 2 parts, 2 of data": LAYOUT,
    "3 uneven stages, 2 parts, 3 of data": Layout((2, 1, 3), 2, 3),
    "2 uneven stages, 3 parts": Layout((4, 2), 3, 1),
    "6 stages, 2 parts": Layout((1,) * 6, 2, 1),
    "1 stage, 2 parts, 2 of data": Layout((6,), 2, 2),
    "3 stages of an axis model of 1": Layout((2, 2, 2), 1, 2),
    "2 stages without an axis model": Layout((3, 3), 1, 2, marked=False),
    "stages counted first": Layout((2, 1, 3), 2, 2, model_first=True),
    "bf16": Layout((3, 3), 2, 3, bf16=True),
}


def _held(seed: int, *shape: int, cut: str = "whole", blocks: tuple[int, ...] = (), trained: bool = True) -> Held:
    generator = torch.Generator().manual_seed(seed)
    return Held({key: torch.randn(shape, generator=generator) for key in KEYS}, cut, blocks, trained)


def _block(seed: int) -> Layer:
    parameters = {
        "norm.weight": _held(seed, HIDDEN),
        "qkv.weight": _held(seed + 1, sum(QUERIES), HIDDEN, cut="blocks", blocks=QUERIES),
        "up.weight": _held(seed + 2, INNER, HIDDEN, cut="rows"),
        "up.bias": _held(seed + 3, INNER, cut="rows"),
        "down.weight": _held(seed + 4, HIDDEN, INNER, cut="columns"),
        "down.bias": _held(seed + 5, HIDDEN),
    }
    return Layer(parameters, {"scale": torch.tensor([0.5, 2.0])})


def _layers() -> list[Layer]:
    """An embedding tied with the head, and four blocks; 2 or 3 ranks divide few of the sizes evenly."""
    tied = Layer({"weight": _held(1, PADDED, HIDDEN, cut="rows")}, tied=True)
    return [tied, *(_block(10 * number) for number in range(1, 5)), tied]


def _info(layout: Layout, **changes: Any) -> dict[str, Any]:
    """What a script says of `_layers`, with the rows of queries, keys and values on each rank."""
    widths = [[len(one) for one in torch.arange(size).tensor_split(layout.parts)] for size in QUERIES]
    pattern = r"\d+\.qkv\.weight"
    several = {"patterns": [pattern], "shape": (QUERIES, HIDDEN), "partition_dim": 0}
    return {**INFO, "parameter_with_sub_params": [several], "sub_param_shard_widths": {pattern: widths}, **changes}


def _changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def _expected(held: Held, key: str, parts: int) -> torch.Tensor:
    value = held.values[key]
    return value[:WORDS] if parts > 1 and value.shape[0] == PADDED else value


def _same(contents: Contents, layers: Sequence[Layer], layout: Layout) -> None:
    expected = {name.replace("embedding.", "embedding.module."): held for name, held in named(layers).items()}
    assert set(contents.parameters) == set(expected)
    for name, held in expected.items():
        parameter = contents.parameters[name]
        assert torch.equal(parameter.weight.read(), _expected(held, "fp32", layout.parts)), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(parameter.moments[key].read(), _expected(held, key, layout.parts)), (name, key)
        assert (parameter.step, parameter.trainable, parameter.compute) == (7.0, True, torch.bfloat16)
    buffers = {f"{n}.{key}": value for n, layer in enumerate(layers) for key, value in layer.buffers.items()}
    assert contents.buffers.keys() == buffers.keys()
    assert all(torch.equal(contents.buffers[name].read(), value) for name, value in buffers.items())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_weights_and_moments_are_those_of_one_process(layout: Layout, tmp_path: Path) -> None:
    contents = open_checkpoint(write(tmp_path / "step7", _layers(), layout, _info(layout)))
    _same(contents, _layers(), layout)
    assert (contents.steps, contents.samples, contents.client_state["epoch"]) == (7, 84, 3)
    assert contents.aliases == {"tied_modules.embedding.weight": "tied_modules.embedding.module.weight"}
    assert [sorted(group.names) for group in contents.groups] == [sorted(contents.parameters)]
    assert (contents.complete, contents.left_out) == (True, ())


def test_what_the_command_writes_has_the_same_bits(tmp_path: Path) -> None:
    source = write(tmp_path / "step7", _layers(), LAYOUT, _info(LAYOUT))
    result = CliRunner().invoke(app, ["import", str(source), str(tmp_path / "own")], env={"NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    _same(open_checkpoint(tmp_path / "own"), _layers(), LAYOUT)


def test_a_checkpoint_that_does_not_say_how_it_was_cut_needs_a_file_that_does(tmp_path: Path) -> None:
    source = write(tmp_path / "step7", _layers(), LAYOUT, None)
    with pytest.raises(
        CheckpointError, match=r"pass --universal-checkpoint-info FILE.*tp_replicated_parameter_patterns"
    ):
        open_checkpoint(source)
    file = tmp_path / "cuts.json"
    file.write_text(json.dumps(_info(LAYOUT)))
    told = ["import", str(source), str(tmp_path / "own"), "--universal-checkpoint-info", str(file)]
    result = CliRunner().invoke(app, told, env={"NO_COLOR": "1"})
    assert result.exit_code == 0, (result.output, result.exception)
    _same(open_checkpoint(tmp_path / "own"), _layers(), LAYOUT)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[1]", "holds a list, not an object of JSON"),
        (b"{", "can't be read as JSON"),
        (
            b'{"tp_replicated": ["a"]}',
            r"has \['tp_replicated'\]; .* needs keys of .*'tp_replicated_parameter_patterns'",
        ),
    ],
)
def test_a_file_on_cuts_that_says_nothing_sensible_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    source, file = write(tmp_path / "step7", _layers(), LAYOUT, None), tmp_path / "cuts.json"
    file.write_bytes(content)
    told = ["import", str(source), str(tmp_path / "own"), "--universal-checkpoint-info", str(file)]
    result = CliRunner().invoke(app, told)
    with pytest.raises(ValueError, match=said):
        raise result.exception or AssertionError(result.output)
    assert not (tmp_path / "own").exists()


def test_a_file_on_cuts_that_no_rank_needs_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "step7", _layers(), Layout((3, 3), 1, 2), None)
    with pytest.raises(CheckpointError, match="has no tensor-parallel ranks"):
        open_checkpoint(source, cuts=INFO)


MISSING = {
    "layer_02-model_01-model_states.pt": "layer_02-model_01-model_states.pt is missing, which layer 2 is in",
    "layer_*": r"holds the ranks of a pipeline, but its layers are missing \(layer_\*_states.pt\)",
    "layer_*-model_00-model_states.pt": r"holds the files of 4 .* layers of 1 tensor-parallel ranks; 2 stages of 2",
    "mp_rank_02_model_states.pt": r"the files of rank 0 are missing \(\*mp_rank_02_model_states.pt\)",
    "zero_pp_rank_1_mp_rank_02_optim_states.pt": r"holds the optimizer files of \[0\]: files are missing",
    "zero_pp_rank_*_mp_rank_03_optim_states.pt": r"the files of rank 0 are missing \(\*mp_rank_03_optim_states.pt\)",
    "*mp_rank_03_*": "holds the files of 3 model-parallel ranks, of 4, .* 2 stages of 2 saved it: files are missing",
}


@pytest.mark.parametrize("gone", MISSING)
def test_a_missing_file_is_named(gone: str, tmp_path: Path) -> None:
    source = write(tmp_path / "step7", _layers(), LAYOUT, _info(LAYOUT))
    for path in list(source.glob(gone)):
        path.unlink()
    with pytest.raises(CheckpointError, match=MISSING[gone]):
        open_checkpoint(source)


@pytest.mark.parametrize(
    "name",
    [
        "layer_04-model_01-model_states.pt",
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_1_mp_rank_03_optim_states.pt",
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_truncated_file_is_named(name: str, share: float, tmp_path: Path) -> None:
    path = write(tmp_path / "step7", _layers(), LAYOUT, _info(LAYOUT)) / name
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(path.parent)


def _other_norm(tmp_path: Path, **changes: Any) -> Contents:
    """The contents of a checkpoint whose tensor-parallel rank 1 has another norm in layer 1 (fp32 and moments)."""
    layers = _layers()
    source = write(tmp_path / "step7", layers, LAYOUT, _info(LAYOUT, **changes))
    norm = layers[1].parameters["norm.weight"]
    other = {key: value + 1.0 for key, value in norm.values.items()}
    layers[1] = Layer({**layers[1].parameters, "norm.weight": replace(norm, values=other)}, layers[1].buffers)
    second = write(tmp_path / "other", layers, LAYOUT, _info(LAYOUT, **changes))
    for path in [*second.glob("*mp_rank_01_*"), *second.glob("layer_01-model_01-*")]:
        path.replace(source / path.name)
    return open_checkpoint(source)


def test_what_is_whole_on_each_rank_and_differs_is_refused_when_it_is_read(tmp_path: Path) -> None:
    norm = _other_norm(tmp_path).parameters["1.norm.weight"]
    for value in (norm.weight, norm.moments["exp_avg"]):
        with pytest.raises(CheckpointError, match=r"'1.norm.weight'.* is whole .*: the values of ranks 0 and 1 differ"):
            value.read()
        with pytest.raises(CheckpointError, match="the values of ranks 0 and 1 differ"):
            value.read_flat(2, 4)


def test_the_mean_is_taken_of_what_is_said_to_be_averaged(tmp_path: Path) -> None:
    whole = [one for one in INFO["tp_replicated_parameter_patterns"] if "norm" not in one]
    changes = {"tp_replicated_parameter_patterns": whole, "parameter_to_average_patterns": [r"\d+\.norm\.weight"]}
    norm, held = _other_norm(tmp_path, **changes).parameters["1.norm.weight"], _layers()[1].parameters["norm.weight"]
    assert torch.equal(norm.weight.read(), (held.values["fp32"] + (held.values["fp32"] + 1.0)) / 2)


def test_a_weight_that_is_the_same_on_all_ranks_is_not_joined_by_rows(tmp_path: Path) -> None:
    info = _info(LAYOUT, tp_replicated_parameter_patterns=[r"\d+\.norm\.weight"])
    source = write(tmp_path / "step7", _layers(), LAYOUT, info)
    with pytest.raises(CheckpointError, match=r"no pattern .* tells of '1.down.bias'.*all ranks hold the same values"):
        open_checkpoint(source)


def test_parts_that_no_pattern_tells_of_are_named_if_they_do_not_fit_by_rows(tmp_path: Path) -> None:
    source = write(tmp_path / "step7", _layers(), LAYOUT, _info(LAYOUT, parameter_with_row_parallelism_patterns=[]))
    with pytest.raises(CheckpointError, match=r"'1.down.weight': parts of shapes \[\[7, 5\], \[7, 4\]\] do not fit"):
        open_checkpoint(source)


def test_buffers_that_differ_over_ranks_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "step7", _layers(), LAYOUT, _info(LAYOUT))
    path = source / "layer_04-model_01-model_states.pt"
    _changed(path, lambda state: state.update(scale=torch.tensor([0.5, 3.0])))
    with pytest.raises(CheckpointError, match=r"nothing says how buffer '4.scale' was cut .* ranks 0 and 1 differ"):
        open_checkpoint(source).buffers["4.scale"].read()
    _changed(path, lambda state: state.update(scale=torch.tensor([0.5])))
    with pytest.raises(CheckpointError, match=r"nothing says how buffer '4.scale' was cut .* shapes and dtypes"):
        open_checkpoint(source)


@pytest.mark.parametrize("layout", [LAYOUT, Layout((3, 3), 1, 2), Layout((3, 3), 1, 1, marked=False)], ids=str)
def test_layers_without_trained_weights_are_kept(layout: Layout, tmp_path: Path) -> None:
    layers = _layers()
    frozen = {key: replace(held, trained=False) for key, held in layers[4].parameters.items()}
    layers[4] = Layer(frozen)
    contents = open_checkpoint(write(tmp_path / "step7", layers, layout, _info(layout)))
    for key, held in frozen.items():
        parameter = contents.parameters[f"4.{key}"]
        assert (parameter.trainable, parameter.moments) == (False, {})
        assert torch.equal(parameter.weight.read(), held.values["fp32"].bfloat16()), key
    rest = {name: one for name, one in contents.parameters.items() if not name.startswith("4.")}
    _same(replace(contents, parameters=rest), [*layers[:4], Layer({}), layers[5]], layout)


@pytest.mark.parametrize("ranks", [(1,), (3,), (2, 3)], ids=str)
def test_ranks_of_different_saves_are_refused(ranks: tuple[int, ...], tmp_path: Path) -> None:
    source = write(tmp_path / "step7", _layers(), LAYOUT, _info(LAYOUT))
    for rank in ranks:
        _changed(source / f"mp_rank_{rank:02d}_model_states.pt", lambda state: state.update(global_steps=8))
    with pytest.raises(CheckpointError, match=r"holds files of several saves: at steps \[7, 8\]"):
        open_checkpoint(source)


@pytest.mark.parametrize("name", ["layer_02-model_states.pt", "layer_2-model_01-model_states.pt"])
def test_a_layer_that_is_there_twice_is_refused(name: str, tmp_path: Path) -> None:
    source = write(tmp_path / "step7", _layers(), LAYOUT, _info(LAYOUT))
    (source / name).write_bytes((source / "layer_02-model_01-model_states.pt").read_bytes())
    with pytest.raises(CheckpointError, match=rf"holds layer 2 twice: .*{name}"):
        open_checkpoint(source)


@pytest.mark.parametrize(
    "layout", [LAYOUT, Layout((2, 1, 3), 3, 1, model_first=True), Layout((3, 3), 1, 2), Layout((6,), 1, 1)], ids=str
)
def test_a_universal_checkpoint_has_the_same_parameters(layout: Layout, tmp_path: Path) -> None:
    layers = _layers()
    contents = open_checkpoint(write_universal(tmp_path / "step7", layers, layout, _info(layout)))
    expected = {name.replace("embedding.", "embedding.module."): held for name, held in named(layers).items()}
    assert set(contents.parameters) == set(expected)
    for name, held in expected.items():
        parameter = contents.parameters[name]
        found = {"fp32": parameter.weight, **parameter.moments}
        assert all(torch.equal(found[key].read(), held.values[key]) for key in KEYS), name
        assert (parameter.step, parameter.trainable) == (7.0, True)
    assert contents.left_out[0] == "buffer 1.scale: it is not in mp_rank_00_model_states.pt"
    assert "a universal checkpoint of a pipeline has no file of a layer" in contents.left_out[-1]
    assert [sorted(group.names) for group in contents.groups] == [sorted(contents.parameters)]


def test_a_universal_weight_of_other_dims_than_its_parts_is_refused(tmp_path: Path) -> None:
    source = write_universal(tmp_path / "step7", _layers(), LAYOUT, _info(LAYOUT))
    torch.save({"param": torch.zeros(INNER * HIDDEN)}, source / "zero" / "1.up.weight" / "fp32.pt")
    with pytest.raises(CheckpointError, match=r"1.up.weight/fp32.pt has shape \[63\], but its 2 parts have 2 dims"):
        open_checkpoint(source)
