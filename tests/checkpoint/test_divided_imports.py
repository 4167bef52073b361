"""DeepSpeed's checkpoints of pipelines and of experts hold what DeepSpeed held, and load into models of zeroshard.

The fixtures are made by `tests/checkpoint/deepspeed/make_divided_fixtures.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear, mse_loss

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.checkpoint.foreign.contents import Contents
from zeroshard.checkpoint.foreign.deepspeed import find, open_deepspeed
from zeroshard.checkpoint.native import write_native
from zeroshard.errors import CheckpointError
from zeroshard.experts.stacked import StackedExperts
from zeroshard.pipeline.layers import LayerSpec, TiedLayerSpec
from zeroshard.pipeline.module import PipelineModule

CHECKPOINTS = Path(__file__).parent / "deepspeed" / "divided"
CASES = sorted(path.name for path in CHECKPOINTS.iterdir())
EXPERTS, MARK = 4, "deepspeed_experts."
Truth = dict[str, dict[str, torch.Tensor]]


def _opened(folder: Path) -> Contents:
    found = find(folder)
    assert found is not None
    return open_deepspeed(found)


def _truth(case: str) -> Truth:
    """By parameter: weight and moments that DeepSpeed held; experts of a layer stacked."""
    told = load_file(CHECKPOINTS / case / "truth.safetensors")
    if case in _CUTS:
        told = _put_together(told, *_CUTS[case])
    whole = {name: value for name, value in told.items() if MARK not in name}
    first = [name for name in told if f"{MARK}0." in name]
    for name in first:
        parts = [told[name.replace(f"{MARK}0.", f"{MARK}{expert}.")] for expert in range(EXPERTS)]
        whole[name.replace(f"{MARK}0.", MARK)] = torch.stack(parts)
    found: Truth = {}
    for name, value in whole.items():
        parameter, _, key = name.replace("tied_modules.embedding.", "tied_modules.embedding.module.").partition("|")
        found.setdefault(parameter, {})[key] = value
    return found


_WORDS = 13
_CUTS = {  # names by how they are cut: columns, whole on each rank, two weights in one, padded rows
    "tensors": (
        ("o_proj.weight", "down_proj.weight"),
        ("layernorm.weight", "embed_tokens.weight", "norm.weight", "o_proj.bias"),
        (),
        (),
    ),
    "stages_of_tensors": (
        ("back.weight",),
        ("norm.weight", "norm.bias", "back.bias", "places"),
        ("gate_and_up.weight", "gate_and_up.bias"),
        ("embedding.weight",),
    ),
}
_Ends = tuple[str, ...]


def _put_together(
    told: Mapping[str, torch.Tensor], columns: _Ends, whole: _Ends, double: _Ends, padded: _Ends
) -> dict[str, torch.Tensor]:
    """What two tensor-parallel ranks told of a model, by the shapes that it has in one process."""
    found: dict[str, torch.Tensor] = {}
    for name in (name.removesuffix("|0") for name in told if name.endswith("|0")):
        parts, parameter = [told[f"{name}|{rank}"] for rank in range(2)], name.partition("|")[0]
        if parameter.endswith(double):
            parts = [torch.cat(halves) for halves in zip(*(part.chunk(2) for part in parts), strict=True)]
        joined = parts[0] if parameter.endswith(whole) else torch.cat(parts, dim=int(parameter.endswith(columns)))
        found[name] = joined[:_WORDS] if parameter.endswith(padded) else joined
    return found


def _same(contents: Contents, truth: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    assert set(contents.parameters) == set(truth)
    for name, held in truth.items():
        parameter = contents.parameters[name]
        assert torch.equal(parameter.weight.read(), held["fp32"]), name
        assert set(parameter.moments) == {"exp_avg", "exp_avg_sq"}
        assert all(torch.equal(parameter.moments[key].read(), held[key]) for key in parameter.moments), name
        assert (parameter.step, parameter.trainable, parameter.compute) == (3, True, torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_moments_are_those_that_deepspeed_held(case: str) -> None:
    contents = _opened(CHECKPOINTS / case)
    _same(contents, _truth(case))
    facts = json.loads((CHECKPOINTS / case / "truth.json").read_text())
    assert (contents.steps, contents.samples) == (facts["steps"], facts["samples"])
    assert contents.client_state == {"epoch": 2}
    assert contents.left_out == ()
    assert contents.complete
    names = [name for group in contents.groups for name in group.names]
    assert sorted(names) == sorted(contents.parameters)
    assert all(group.options["betas"] == [0.9, 0.95] for group in contents.groups)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.moe = nn.Module()
        self.moe.deepspeed_moe = nn.Module()
        self.moe.deepspeed_moe.gate = nn.Module()
        self.moe.deepspeed_moe.gate.wg = nn.Linear(8, EXPERTS, bias=False)
        expert = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8))
        self.moe.deepspeed_moe.experts = StackedExperts(expert, EXPERTS, 2)
        self.head = nn.Linear(8, 13, bias=False)


def _head(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return linear(x, embedding.weight)


def _pipeline() -> PipelineModule:
    layers = [
        TiedLayerSpec("embedding", nn.Embedding, 13, 7),
        *(LayerSpec(nn.Linear, 7, 9), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 9, 7), LayerSpec(nn.LayerNorm, 7)),
        TiedLayerSpec("embedding", nn.Embedding, 13, 7, forward_fn=_head),
    ]
    return PipelineModule(layers, num_stages=2, loss_fn=mse_loss, partition_method="uniform")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate_and_up, self.back = nn.LayerNorm(6), nn.Linear(6, 20), nn.Linear(10, 6)


class _Held(nn.Module):
    """One parameter and, if asked for, a buffer."""

    def __init__(self, name: str, buffer: bool) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.zeros(6, 6)))
        if buffer:
            self.register_buffer("scale", torch.zeros(1))


def _stages_of_tensors() -> PipelineModule:
    """The model of `deepspeed/stages_of_tensors.py` in one process, over two other stages."""
    layers = [
        TiedLayerSpec("embedding", nn.Embedding, _WORDS, 6),
        LayerSpec(_Held, "places", True),
        LayerSpec(_Block),
        LayerSpec(_Block),
        LayerSpec(_Held, "wide", False),
        TiedLayerSpec("embedding", nn.Embedding, _WORDS, 6, forward_fn=_head),
    ]
    return PipelineModule(layers, num_stages=2, loss_fn=mse_loss, partition_method="parameters")


def _loads(rank: int, world: int, folder: str, truths: dict[str, Truth]) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
    }
    for case, truth in truths.items():
        made = {"pipeline": _pipeline, "stages_of_tensors": _stages_of_tensors, "experts_apart": _Experts}
        model: nn.Module = made[case]()
        experts = {id(p) for name, p in model.named_parameters() if MARK in name}
        groups = [[p for p in model.parameters() if (id(p) in experts) is chosen] for chosen in (False, True)]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-2)
        engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer, config=config)
        zeroshard.load(engine.module, folder, case)
        own = dict(engine.module.named_parameters())
        assert own.keys() <= truth.keys()
        for name, parameter in own.items():
            weight = zeroshard.safe_get_full_fp32_param(parameter)
            assert weight is not None
            assert torch.equal(weight, truth[name]["fp32"]), (case, name)
            for key in ("exp_avg", "exp_avg_sq"):
                moment = zeroshard.safe_get_full_optimizer_state(parameter, key)
                assert moment is not None
                assert torch.equal(moment, truth[name][key]), (case, name, key)
        engine.destroy()


def test_what_is_imported_loads_into_stages_and_divided_experts(tmp_path: Path) -> None:
    cases = ("pipeline", "experts_apart", "stages_of_tensors")
    for case in cases:
        write_native(_opened(CHECKPOINTS / case), tmp_path, case)
    run_ranks(2, _loads, str(tmp_path), {case: _truth(case) for case in cases})


@pytest.mark.parametrize(
    ("case", "gone", "said"),
    [
        ("pipeline", "zero_pp_rank_1_mp_rank_01_optim_states.pt", r"holds the optimizer files of \[0\]"),
        (
            "pipeline",
            "zero_pp_rank_[01]_mp_rank_01_optim_states.pt",
            r"rank 0 are missing \(\*mp_rank_01_optim_states.pt\)",
        ),
        ("pipeline", "mp_rank_00_model_states.pt", r"rank 0 are missing \(\*mp_rank_00_model_states.pt\)"),
        ("pipeline", "*mp_rank_01_*", r"holds the files of 1 model-parallel ranks, of 2, .* 2 stages of 1 saved it"),
        ("pipeline", "layer_03-model_states.pt", "layer_03-model_states.pt is missing, which layer 3 is in"),
        ("experts", "layer_0_expert_1_mp_rank_00_model_states.pt", r"of the experts of layer 0 the files \[0, 2, 3\]"),
        ("experts_apart", "zero_pp_rank_3_mp_rank_00_optim_states.pt", r"holds the optimizer files of \[0, 1, 2\]"),
    ],
)
def test_a_missing_file_is_named(case: str, gone: str, said: str, tmp_path: Path) -> None:
    folder = shutil.copytree(CHECKPOINTS / case, tmp_path / case)
    for path in (folder / "step3").glob(gone):
        path.unlink()
    with pytest.raises(CheckpointError, match=said):
        _opened(folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layer_00-model_states.pt", "experts beside pipeline stages or tensor-parallel ranks are not imported"),
        ("layer_00-slice_01-model_states.pt", "layers of other axes than pipe, data and model are not imported"),
        ("layer_0_expert_0_mp_rank_01_model_states.pt", "experts beside tensor parallelism are not imported"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "experts and an optimizer without ZeRO are not imported"),
    ],
)
def test_what_is_not_imported_is_refused_by_file(name: str, said: str, tmp_path: Path) -> None:
    folder = shutil.copytree(CHECKPOINTS / "experts", tmp_path / "experts")
    (folder / "step3" / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=said):
        _opened(folder)


def _with_info(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The tensor-parallel checkpoint with other words on how it was cut."""
    made = shutil.copytree(CHECKPOINTS / "tensors", folder / "tensors")
    for rank in range(2):
        path = made / "step3" / f"mp_rank_{rank:02d}_model_states.pt"
        state = torch.load(path, weights_only=True)
        change(state["universal_checkpoint_info"])
        torch.save(state, path)
    return made


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"tp_replicated_parameter_patterns": ["(a+)+$"]},
            r"pattern '\(a\+\)\+\$' .* is refused: it could run long",
        ),
        ({"parameter_with_row_parallelism_patterns": ["["]}, r"damaged: the pattern '\['"),
        (
            {"parameter_with_sub_params": [{"patterns": ["lm_head"], "shape": [[4, 4], -1], "partition_dim": 1}]},
            r"several weights in one that are cut along dim 1 .* are not imported, only along dim 0",
        ),
        (
            {"parameter_with_sub_params": [{"patterns": ["lm_head"], "shape": [[4, 4], -1], "partition_dim": 0}]},
            r"'lm_head.weight': .* says \[\(2, 2\), \(2, 2\)\] of its weights' rows on each rank, .* have \[16, 16\]",
        ),
        ({"vocabulary_parameter_patterns": "lm_head.weight"}, r"is 'lm_head.weight', not a list"),
        ({"parameter_to_average_patterns": ["[a-z]*[a-z]*[a-z]*$"] * 400_000}, r"patterns .* could run for hours"),
        ({"autotp_unsupported_parameter_patterns": ["a"]}, r"parts that DeepSpeed itself can't describe"),
    ],
)
def test_words_on_cuts_that_can_not_be_followed_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        _opened(_with_info(tmp_path, lambda info: info.update(change)))


@pytest.mark.parametrize(("case", "rank"), [("tensors", 1), ("stages_of_tensors", 2), ("stages_of_tensors", 3)])
def test_ranks_must_say_the_same_of_cuts(case: str, rank: int, tmp_path: Path) -> None:
    folder = shutil.copytree(CHECKPOINTS / case, tmp_path / case)
    path = folder / "step3" / f"mp_rank_{rank:02d}_model_states.pt"
    state = torch.load(path, weights_only=True)
    state["universal_checkpoint_info"]["parameter_with_row_parallelism_patterns"] = ["none"]
    torch.save(state, path)
    with pytest.raises(
        CheckpointError, match=r"several saves: universal_checkpoint_info is .* on rank 0, .* on rank 1"
    ):
        _opened(folder)


def test_a_padded_vocabulary_loses_its_padding_and_blocks_are_sorted(tmp_path: Path) -> None:
    whole = _truth("tensors")
    gate = "model.layers.0.mlp.gate_proj.weight"
    blocks = {"original_vocab_size": 29, "parameter_with_2_sub_params_cat_dim_0": [gate]}
    contents = _opened(_with_info(tmp_path, lambda info: info.update(blocks)))
    assert torch.equal(contents.parameters["lm_head.weight"].weight.read(), whole["lm_head.weight"]["fp32"][:29])
    rows = torch.arange(24).view(2, 2, 6).transpose(0, 1).flatten()  # by rank and block, then by block and rank
    assert torch.equal(contents.parameters[gate].weight.read(), whole[gate]["fp32"][rows])


def test_several_weights_in_one_are_sorted_by_their_number(tmp_path: Path) -> None:
    head = "lm_head.weight"
    several = [{"patterns": [head], "shape": [4, -1], "partition_dim": 0}]
    contents = _opened(_with_info(tmp_path, lambda info: info.update(parameter_with_sub_params=several)))
    rows = torch.arange(32).view(2, 4, 4).transpose(0, 1).flatten()  # by rank and weight, then by weight and rank
    assert torch.equal(contents.parameters[head].weight.read(), _truth("tensors")[head]["fp32"][rows])


def test_a_shared_weight_that_only_the_first_rank_tells_of_is_shared_on_all(tmp_path: Path) -> None:
    folder = shutil.copytree(CHECKPOINTS / "tensors", tmp_path / "tensors")
    for rank in range(2):
        path = folder / "step3" / f"mp_rank_{rank:02d}_model_states.pt"
        state = torch.load(path, weights_only=True)
        state["module"]["second.weight"] = state["module"]["lm_head.weight"]
        state["shared_params"] = {} if rank else {"second.weight": "lm_head.weight"}
        torch.save(state, path)
    contents = _opened(folder)
    assert contents.aliases == {"second.weight": "lm_head.weight"}
    _same(contents, _truth("tensors"))


def _as_universal(folder: Path) -> Path:
    """The tensor-parallel checkpoint as DeepSpeed's converter writes it, with a frozen weight cut by columns."""
    made = _with_info(folder, lambda info: info["parameter_with_row_parallelism_patterns"].append("^still$"))
    contents, step = _opened(made), made / "step3"
    for name, parameter in contents.parameters.items():
        (step / "zero" / name).mkdir(parents=True)
        for key, value in {"fp32": parameter.weight, **parameter.moments}.items():
            torch.save({"param": value.read()}, step / "zero" / name / f"{key}.pt")
        torch.save(torch.tensor(3.0), step / "zero" / name / "step.pt")
    options = {**contents.groups[0].options, "params": [0]}
    torch.save({"zero_stage": 1, "param_groups": [options]}, step / "zero" / "optimizer_state.pt")
    for rank in range(2):
        path = step / f"mp_rank_{rank:02d}_model_states.pt"
        state = torch.load(path, weights_only=True)
        state["module"]["still"] = torch.full((2, 3), float(rank))
        torch.save(state, path)
    for path in step.glob("zero_pp_rank_*"):
        path.unlink()
    return made


def test_a_universal_checkpoint_of_tensor_parallel_ranks_has_whole_weights(tmp_path: Path) -> None:
    contents = _opened(_as_universal(tmp_path))
    still = contents.parameters["still"]
    assert not still.trainable
    assert torch.equal(still.weight.read(), torch.tensor([[0.0] * 3 + [1.0] * 3] * 2))
    trained = {name: one for name, one in contents.parameters.items() if name != "still"}
    _same(replace(contents, parameters=trained), _truth("tensors"))


def test_weights_that_the_converter_did_not_join_from_these_ranks_are_refused(tmp_path: Path) -> None:
    home = _as_universal(tmp_path) / "step3" / "zero" / "lm_head.weight"
    torch.save({"param": torch.load(home / "fp32.pt", weights_only=True)["param"].roll(1, 0)}, home / "fp32.pt")
    with pytest.raises(CheckpointError, match=r"'lm_head.weight': the master weights \(optimizer files\) do not round"):
        _opened(home.parents[2]).parameters["lm_head.weight"].weight.read()


def test_a_missing_tensor_parallel_rank_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(CHECKPOINTS / "tensors", tmp_path / "tensors")
    (folder / "step3" / "mp_rank_00_model_states.pt").rename(folder / "step3" / "mp_rank_02_model_states.pt")
    with pytest.raises(CheckpointError, match="the files of rank 0 are missing"):
        _opened(folder)
