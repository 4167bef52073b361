"""Models of every kind are traced: transformers' own, and a user's module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.planner.settings import BF16
from zeroshard.errors import PlanError
from zeroshard.planner.machine.hardware import parse_cluster
from zeroshard.planner.predict.rows import Row, Setting, make_row
from zeroshard.planner.predict.tiers import Offload
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.sources import factory_source, find_source
from zeroshard.planner.trace.workload import Workload

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_key_value_heads": 2},
    "qwen2": {**SMALL, "num_key_value_heads": 2},
    "mistral": {**SMALL, "num_key_value_heads": 2},
    "mixtral": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 512},
    "bert": SMALL,
    "t5": {"d_model": 128, "d_ff": 256, "num_layers": 3, "num_heads": 4, "d_kv": 32, "vocab_size": 512},
    "vit": {**SMALL, "image_size": 64, "patch_size": 16},
}


def _row(work: Workload, how: Checkpointing) -> Row:
    return make_row(work, BF16, Setting(3, Offload.NONE, how), parse_cluster("8xA100"))


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_models_are_planned_from_their_config(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **MODELS[kind]}), encoding="utf-8")
    work = Workload(find_source(str(path)), 8, 512)
    plain, kept = _row(work, Checkpointing.OFF), _row(work, Checkpointing.ON)
    again = _row(work, Checkpointing.REENTRANT) if kind in ("llama", "t5") else kept
    assert len(work.units) >= 4
    assert kept.traced.peak < plain.traced.peak
    assert again.traced.peak == pytest.approx(kept.traced.peak, rel=0.15)
    assert kept.traced.flops > plain.traced.flops
    assert set(plain.traced.order) == set(range(1, len(work.units)))
    # Every unit's gradients are collected once, in each way of computing.
    for row in (plain, kept, again):
        collected = [unit for units in row.traced.complete for unit in units]
        assert sorted(set(collected)) == sorted(collected)
        assert set(range(1, len(work.units))) <= set(collected)


def test_a_users_own_module_is_planned() -> None:
    work = Workload(factory_source("tests.planner.zoo:make_tiny"), 4, 16)
    row = _row(work, Checkpointing.ON)
    assert work.numel == 3 * (64 * 64 + 64)
    assert row.traced.peak < 20 * 4 * 16 * 64 * 2


def test_a_module_whose_inputs_are_unknown_says_how_to_give_them() -> None:
    work = Workload(factory_source("tests.planner.zoo:make_unknown"), 4, 16)
    with pytest.raises(PlanError, match=r"vectors.*make_batch"):
        _row(work, Checkpointing.OFF)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model_type": "lama"}, "llama"),
        ({"hidden_size": 12}, "model_type"),
        ({"zero_optimization": {"stage": 3}}, "as --config"),
        ({"model_type": "llama", "hidden_size": -1}, "hidden_size"),
        ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}, "divide"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "num_hidden_layers"),
        ({"model_type": "llama", "num_hidden_layers": 10**7}, "10,000 layers"),
        ({"model_type": "gpt2", "n_layer": -1}, "n_layer is -1"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalML"]}, "LlamaForCausalLM"),
        ({"model_type": "llama", "architectures": [3]}, "no model 3"),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, "list of class names"),
        ({"model_type": "whisper"}, "no model with a loss"),
        ({"model_type": "resnet"}, "no image_size"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(content: dict[str, Any], expected: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(PlanError, match=expected):
        Workload(find_source(str(path)), 1, 16)


def test_what_a_config_asks_for_and_a_plan_leaves_out_is_said(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    odd = {"quantization_config": {"quant_method": "bitsandbytes"}, "auto_map": {"AutoConfig": "code.Config"}}
    path.write_text(json.dumps({"model_type": "llama", **odd}), encoding="utf-8")
    notes = find_source(str(path)).notes
    assert [key for key in odd if any(key in note for note in notes)] == list(odd)


def test_learned_positions_are_a_limit(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", **MODELS["gpt2"]}), encoding="utf-8")
    with pytest.raises(PlanError, match="1024"):
        Workload(find_source(str(path)), 1, 4096)
