"""What the engine's builder reads: plain fields, defaults filled in, with the origin of each."""

from __future__ import annotations

import ast
import dataclasses
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import zeroshard.config
from zeroshard.config import (
    Config,
    LeafModules,
    LossScaleConfig,
    PrecisionConfig,
    ReductionConfig,
    ZeroConfig,
    load_config,
)
from zeroshard.config.fields import LARGEST
from zeroshard.config.models import DEFAULT_LEAVES
from zeroshard.config.resolved import OffloadConfig
from zeroshard.errors import ConfigError, ZeroShardWarning


def load(world_size: int = 2, overrides: dict[str, Any] | None = None, **config: Any) -> Config:
    batch = {"train_micro_batch_size_per_gpu": 1}
    return load_config({**batch, **config}, world_size=world_size, overrides=overrides)


def problem_of(world_size: int = 2, overrides: dict[str, Any] | None = None, **config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(world_size, overrides, **config)
    (problem,) = caught.value.problems
    return problem


def test_the_defaults() -> None:
    config = load()
    assert config.zero == ZeroConfig(
        stage=0,
        overlap_step=False,
        param_persistence_threshold=100_000,
        model_persistence_threshold=LARGEST,
        prefetch_bucket_size=50_000_000,
        max_live_parameters=1_000_000_000,
        max_reuse_distance=1_000_000_000,
        leaf_modules=LeafModules(DEFAULT_LEAVES, (), ()),
        offload=None,
    )
    assert config.precision == PrecisionConfig("fp32", None, None, None, "auto")
    assert config.reduction == ReductionConfig(prescale=False, predivide_factor=1.0, op="mean")
    assert (config.loss_scale, config.optimizer, config.scheduler, config.steps_per_print) == (None, None, None, None)
    assert (config.gradient_clipping, config.allow_untested_optimizer) == (1.0, False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gathers_run_on_after_a_step_only_where_zeroshards_own_key_asks(stage: int) -> None:
    for others in ({}, {"overlap_comm": True}, {"overlap_comm": "auto"}):
        assert load(zero_optimization={"stage": stage, **others}).zero.overlap_step is False
    assert load(zero_optimization={"stage": stage, "overlap_step": True}).zero.overlap_step is True


@pytest.mark.parametrize(
    "name",
    ["param_persistence_threshold", "model_persistence_threshold", "prefetch_bucket_size", "max_live_parameters"],
)
def test_stage3_names_are_aliases(name: str) -> None:
    config = load(zero_optimization={f"stage3_{name}": 12})
    assert getattr(config.zero, name) == 12
    assert config.origins[f"zero_optimization.{name}"] == f"config as stage3_{name}"


def test_a_key_under_both_its_names_must_say_the_same() -> None:
    load(zero_optimization={"stage3_max_live_parameters": 5, "max_live_parameters": 5})
    problem = problem_of(zero_optimization={"stage3_max_live_parameters": 5, "max_live_parameters": 6})
    assert "given twice under two names: 5" in problem


@pytest.mark.parametrize("section", ["bf16", "bfloat16", "fp16"])
def test_a_precision_is_switched_on_by_its_section(section: str) -> None:
    sections: dict[str, Any] = {section: {"enabled": True}}
    config = load(2, **sections)
    assert config.precision.compute == ("fp16" if section == "fp16" else "bf16")
    assert (config.loss_scale is None) == (section != "fp16")


def test_two_precisions_are_a_contradiction() -> None:
    assert "fp16.enabled" in problem_of(bf16={"enabled": True}, fp16={"enabled": True})


def test_the_loss_scale_is_dynamic_at_zero_and_else_static() -> None:
    dynamic = load(fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 3, "loss_scale_window": 10})
    assert dynamic.loss_scale == LossScaleConfig(True, 256.0, 10, 3, False, 1.0)
    static = load(fp16={"enabled": True, "loss_scale": 128, "consecutive_hysteresis": True, "min_loss_scale": 0.5})
    assert static.loss_scale == LossScaleConfig(False, 128.0, 1000, 2, True, 0.5)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", "fp32"), ("BF16", "bf16"), ("torch.float16", "fp16")])
def test_dtypes_have_their_usual_names(name: str, dtype: str) -> None:
    config = load(
        bf16={"enabled": True},
        communication_data_type=name,
        data_types={"grad_accum_dtype": name, "buffer_dtype": name, "keep_in_fp32_modules": ["norm", "router"]},
    )
    assert config.precision == PrecisionConfig("bf16", dtype, dtype, dtype, ("norm", "router"))  # type: ignore[arg-type]


def test_a_parameter_dtype_must_agree_with_the_precision() -> None:
    load(bf16={"enabled": True}, data_types={"param_dtype": "bf16"})
    assert "set bf16.enabled" in problem_of(data_types={"param_dtype": "bf16"})


def test_the_reduction_is_obeyed() -> None:
    config = load(prescale_gradients=True, gradient_predivide_factor=2, gradient_allreduce_op="SUM")
    assert config.reduction == ReductionConfig(True, 2.0, "sum")


@pytest.mark.parametrize(("value", "expected"), [(10, 10), (1e3, 1000), (math.inf, None), ("auto", None)])
def test_steps_per_print_may_be_never(value: Any, expected: int | None) -> None:
    assert load(steps_per_print=value).steps_per_print == expected


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"zero_optimization": {"stage": 4}}, '"auto" or a whole number from 0 to 3, not 4'),
        ({"zero_optimization": {"stage": "3"}}, '"auto" or a whole number from 0 to 3, not "3"'),
        ({"zero_optimization": {"stage": True}}, '"auto" or a whole number from 0 to 3, not true'),
        ({"zero_optimization": {"prefetch_bucket_size": -1}}, "a whole number of at least 0, not -1"),
        ({"zero_optimization": {"overlap_comm": "false"}}, 'true or false, not "false"'),
        ({"bf16": {"enabled": 2}}, "true or false, not 2"),
        ({"gradient_clipping": -0.5}, "a number of at least 0, not -0.5"),
        ({"gradient_predivide_factor": 0}, "a number above 0, not 0"),
        ({"gradient_allreduce_op": "max"}, '"mean" or "sum", not "max"'),
        ({"communication_data_type": "int8"}, '"fp32", "bf16" or "fp16", not "int8"'),
        ({"data_types": {"keep_in_fp32_modules": "norm"}}, '"auto" or a list of strings, not "norm"'),
        ({"fp16": {"loss_scale_window": 0}}, "a whole number of at least 1, not 0"),
        ({"steps_per_print": 0}, "a whole number of at least 1, not 0"),
    ],
)
def test_a_wrong_value_says_what_is_wanted(config: dict[str, Any], wanted: str) -> None:
    assert f"must be {wanted}" in problem_of(**config)


def test_the_config_cannot_be_changed_and_pickles() -> None:
    config = load(optimizer={"type": "Adam"})
    assert config.optimizer is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.zero.stage = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.optimizer.params["lr"] = 1  # type: ignore[index]
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("key", "value", "target"),
    [
        ("cpu_offload", False, "zero_optimization.offload_optimizer.device"),
        ("cpu_offload_param", False, "zero_optimization.offload_param.device"),
        ("cpu_offload_use_pin_memory", True, "zero_optimization.offload_optimizer.pin_memory"),
        (
            "stage3_gather_fp16_weights_on_model_save",
            True,
            "zero_optimization.gather_16bit_weights_on_model_save",
        ),
    ],
)
def test_a_deprecated_key_stands_for_its_successor_with_a_warning(key: str, value: bool, target: str) -> None:
    with pytest.warns(ZeroShardWarning, match=f"{key} .* is deprecated; write {target}"):
        config = load(zero_optimization={key: value})
    assert config.origins[target] == f"config, deprecated alias {key}"


def test_a_deprecated_key_that_can_not_be_obeyed_is_refused_under_its_successors_name() -> None:
    problem = problem_of(zero_optimization={"cpu_offload": True})
    assert problem.startswith("zero_optimization.offload_optimizer.device (config, deprecated alias cpu_offload)")
    assert "use stage 1, 2 or 3" in problem


CPU = {"device": "cpu"}
DISK = {"device": "nvme", "nvme_path": "/a"}


@pytest.mark.parametrize(
    ("zero", "wrong"),
    [
        (
            {"stage": 3, "offload_param": CPU, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            "offload_param.device .* ratio 1",
        ),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "offload_optimizer.device .* set nvme_path beside it"),
        ({"stage": 0, "offload_optimizer": DISK}, 'is "nvme", which needs state that is divided; use stage 1, 2 or 3'),
        ({"stage": "auto", "offload_optimizer": DISK}, '"stage": "auto" does not choose among'),
        ({"stage": 3, "offload_optimizer": {**DISK, "nvme_path": ["/a", "/a"]}}, "nvme_path .* names a folder twice"),
        ({"stage": 3, "offload_optimizer": {**DISK, "nvme_path": 5}}, "nvme_path .*must be a"),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu", "cpu_ratio": 0.5}},
            'cpu_ratio .* is 0.5, a part of what device "nvme" takes',
        ),
        (
            {"stage": 2, "offload_optimizer": {**DISK, "ratio": 0.25, "cpu_ratio": 0.5}},
            "cpu_ratio .* more than the",
        ),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "offload_param.device .* set nvme_path beside it"),
        ({"stage": "auto", "offload_param": DISK}, 'offload_param.device .*"stage": "auto" does not choose among'),
        (
            {"stage": 3, "offload_param": {**DISK, "nvme_path": ["/a", "/a"]}},
            "offload_param.nvme_path .* a folder twice",
        ),
        (
            {"stage": 3, "offload_param": DISK, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            'offload_param.device .* is "nvme", which needs an offload_optimizer of ratio 1',
        ),
        (
            {"stage": 3, "offload_param": CPU, "offload_optimizer": {**DISK, "ratio": 0.5}},
            "offload_param.device .* ratio 1",
        ),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}, "ratio .* at most 1"),
        ({"stage": 3, "offload_optimizer": {"device": "gpu"}}, 'offload_optimizer.device .*"cpu"'),
    ],
)
def test_offload_that_can_not_be_is_refused(zero: dict[str, Any], wrong: str) -> None:
    assert re.search(wrong, problem_of(zero_optimization=zero))


def test_offload_to_the_host_is_obeyed() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3, "pin_memory": False}}
    assert load(zero_optimization=zero).zero.offload == OffloadConfig(0.3, param=False, pin_memory=False)
    assert load(zero_optimization={"stage": 2}).zero.offload is None


def test_offload_to_disk_is_obeyed() -> None:
    zero = {"stage": 2, "offload_optimizer": {**DISK, "ratio": 0.3, "pipeline_read": True, "buffer_count": 9}}
    assert load(zero_optimization=zero).zero.offload == OffloadConfig(0.3, False, True, ("/a",), state_on_disk=True)
    several = {**DISK, "nvme_path": ["/a", "/b"], "encrypt": True, "allow_visible_spill": True, "pin_memory": False}
    zero = {"stage": 3, "offload_optimizer": several, "offload_param": CPU}
    expected = OffloadConfig(1.0, True, False, ("/a", "/b"), encrypt=True, allow_visible=True, state_on_disk=True)
    assert load(zero_optimization=zero).zero.offload == expected


def test_state_in_three_places_is_obeyed() -> None:
    zero = {"stage": 2, "offload_optimizer": {**DISK, "ratio": 0.75, "cpu_ratio": 0.25}}
    expected = OffloadConfig(0.75, False, True, ("/a",), state_on_disk=True, host_ratio=0.25)
    assert load(zero_optimization=zero).zero.offload == expected


def test_parameters_on_disk_are_obeyed_whatever_place_the_state_has() -> None:
    unneeded = {"buffer_count": 9, "buffer_size": 10, "max_in_cpu": 5, "pipeline_read": True, "pipeline_write": True}
    zero = {"stage": 3, "offload_param": {**DISK, **unneeded}, "offload_optimizer": CPU}
    assert load(zero_optimization=zero).zero.offload == OffloadConfig(1.0, True, True, ("/a",), param_on_disk=True)
    both = OffloadConfig(1.0, True, True, ("/b", "/a"), encrypt=True, state_on_disk=True, param_on_disk=True)
    elsewhere = {
        "stage": 3,
        "offload_param": {**DISK, "encrypt": True},
        "offload_optimizer": {**DISK, "nvme_path": "/b"},
    }
    assert load(zero_optimization=elsewhere).zero.offload == both
    alone = {"stage": 3, "offload_param": {**DISK, "pin_memory": False}}
    with pytest.warns(ZeroShardWarning, match="takes the optimizer's state to disk too"):
        found = load(optimizer={"type": "Adam"}, zero_optimization=alone).zero.offload
    assert found == OffloadConfig(1.0, True, False, ("/a",), state_on_disk=True, param_on_disk=True)
    with pytest.warns(ZeroShardWarning, match='"nvme" has no effect at stage 2'):
        assert load(zero_optimization={"stage": 2, "offload_param": DISK}).zero.offload is None


def test_a_deprecated_key_may_not_contradict_its_successor() -> None:
    config = {"cpu_offload": True, "offload_optimizer": {"device": "none"}}
    assert "means zero_optimization.offload_optimizer.device" in problem_of(zero_optimization=config)


@pytest.mark.parametrize("section", [{"tp_size": 8}, {"tp": {"tp_size": 8}}, {"tensor_parallel": {"tp_size": 8}}])
def test_tensor_parallelism_is_not_built_yet_under_each_of_its_names(section: dict[str, Any]) -> None:
    assert "tensor parallelism, which is not built yet" in problem_of(tensor_parallel=section)


def test_stages_are_not_cut_by_the_config_alone() -> None:
    problem = problem_of(pipeline_parallel={"pp_size": 8})
    assert "stages that the config alone cuts, which is not built yet" in problem
    assert "PipelineModule" in problem
    load(pipeline_parallel={"pp_size": 1}, tensor_parallel={"tp_size": 1})


def test_the_config_imports_neither_torch_nor_the_rest_of_zeroshard() -> None:
    imported: set[str] = set()
    for path in Path(zeroshard.config.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
    ours = {name for name in imported if name.startswith("zeroshard") and not name.startswith("zeroshard.config")}
    # Which import nothing themselves but the first.
    assert ours <= {"zeroshard.errors", "zeroshard.bounded", "zeroshard.fp8.recipe"}
    assert not {name for name in imported if name.split(".")[0] in ("torch", "numpy", "transformers")}
