"""A frozen base in 4 bits with adapters is planned as it is trained: its codes, its scales, and decoded weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.installed import need
from zeroshard.errors import PlanError
from zeroshard.mesh import Mesh
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.placement import STAGES
from zeroshard.planner.show.cli import main
from zeroshard.planner.trace.checkpointing import Checkpointing
from zeroshard.planner.trace.sources import ModelSource, find_source, with_adapter
from zeroshard.planner.trace.workload import Workload
from zeroshard.sharding.units import ParameterSpec

need("transformers", "peft")

HIDDEN, FFN = 512, 2048
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}
LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}


def _source(folder: Path, quantization: dict[str, Any] | None, adapter: dict[str, Any] = LORA) -> ModelSource:
    content = LLAMA if quantization is None else {**LLAMA, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
    return with_adapter(find_source(str(folder)), folder)


def _parameters(source: ModelSource, length: int = 16) -> dict[str, ParameterSpec]:
    return {spec.name: spec for unit in Workload(source, 1, length).units for spec in unit.parameters}


@pytest.mark.parametrize("nested", [False, True])
def test_weights_are_codes_and_scales(nested: bool, tmp_path: Path) -> None:
    found = _parameters(_source(tmp_path, {**FOUR_BITS, "bnb_4bit_use_double_quant": nested}))
    up = "base_model.model.model.layers.1.mlp.up_proj.base_layer"
    codes, scales = found[f"{up}.weight"], found[f"{up}._weight_absmax"]
    assert (codes.shape, codes.dtype, codes.packed) == ((HIDDEN * FFN // 2, 1), torch.uint8, True)
    assert (scales.shape, scales.packed) == ((HIDDEN * FFN // 64,), True)
    assert scales.dtype == (torch.uint8 if nested else torch.float32)
    assert not any(name.endswith("state2_absmax") for name in found)  # 64 of them, whole on each rank
    assert found["base_model.model.lm_head.weight"].shape == (256, HIDDEN)
    assert {name.rsplit(".", 2)[0][-6:] for name, spec in found.items() if spec.trainable} == {"lora_A", "lora_B"}


def test_a_base_in_its_own_dtype_takes_adapters_too(tmp_path: Path) -> None:
    found = _parameters(_source(tmp_path, None))
    up = found["base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"]
    assert (up.shape, up.trainable) == ((FFN, HIDDEN), False)


def test_codes_are_stored_and_left_out_as_the_config_says(tmp_path: Path) -> None:
    odd = {"bnb_4bit_quant_storage": "bfloat16", "llm_int8_skip_modules": ["mlp"]}
    found = _parameters(_source(tmp_path, {**FOUR_BITS, **odd}))
    block = "base_model.model.model.layers.0"
    query = found[f"{block}.self_attn.q_proj.base_layer.weight"]
    assert (query.shape, query.dtype, query.packed) == ((HIDDEN * HIDDEN // 4, 1), torch.bfloat16, True)
    assert found[f"{block}.mlp.up_proj.base_layer.weight"].shape == (FFN, HIDDEN)


def _memory(source: ModelSource, how: Checkpointing = Checkpointing.OFF) -> int:
    """The most bytes that the model's own computation takes."""
    recipe = Recipe(sharding=STAGES[3], precision=Precision("bfloat16"))
    return Workload(source, 1, 8).plan(recipe, Mesh.data_parallel(1), how)[1].peak


def test_one_weight_at_a_time_is_decoded_whole(tmp_path: Path) -> None:
    """With eight tokens a block's activations are little beside a decoded weight, which nothing keeps."""
    whole = HIDDEN * FFN * 2
    packed, plain = _memory(_source(tmp_path, FOUR_BITS)), _memory(_source(tmp_path, None))
    assert 0.9 * whole <= packed - plain <= 1.1 * whole
    assert whole <= _memory(_source(tmp_path, FOUR_BITS), Checkpointing.ON) <= 1.3 * whole


def test_the_command_plans_a_base_in_4_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _source(tmp_path, FOUR_BITS)
    given = [str(tmp_path), "--cluster", "1xH100-80GB", "--seq", "32", "--checkpointing", "on", "--json"]
    with pytest.raises(SystemExit, match="0"):
        main([*given, "--adapter", str(tmp_path)])
    packed = json.loads(capsys.readouterr().out)
    with pytest.raises(SystemExit, match="0"):
        main(given)
    whole = json.loads(capsys.readouterr().out)
    assert any("4 bits" in note for note in packed["notes"])
    assert not any("is not read" in note for note in packed["notes"])
    assert any("is not read" in note for note in whole["notes"])


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        ({**LORA, "target_modules": ["nothing"]}, "nothing"),
        ({**LORA, "target_modules": "(("}, "unterminated"),
        ({"r": 4}, "peft_type"),
        ({**LORA, "peft_type": "OTHER"}, "OTHER"),
    ],
)
def test_an_adapter_that_does_not_fit_is_named(adapter: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"--adapter.*{expected}"):
        _source(tmp_path, FOUR_BITS, adapter).module()


def test_a_missing_adapter_and_an_unknown_dtype_are_named(tmp_path: Path) -> None:
    source = _source(tmp_path, None)
    with pytest.raises(PlanError, match=r"no such file.*adapter_config\.json"):
        with_adapter(source, tmp_path / "elsewhere.json")
    with pytest.raises(PlanError, match="bnb_4bit_compute_dtype is 'float31'"):
        _source(tmp_path, {**FOUR_BITS, "bnb_4bit_compute_dtype": "float31"})
