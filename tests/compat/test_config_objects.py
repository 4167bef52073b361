"""Sections of a config as objects, and what is computed from a config without a model."""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import pytest
from deepspeed.elasticity import compute_elastic_config
from deepspeed.elasticity.config import ElasticityError, ElasticityIncompatibleWorldSize
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.precision_config import DeepSpeedFP16Config, get_bfloat16_config, get_float16_config
from deepspeed.utils.numa import parse_range_list
from pydantic import Field, ValidationError
from torch import nn

from zeroshard.errors import ConfigError

ELASTIC = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 3], "version": 0.1, "min_time": 20}


REPLACED: Any = {"deprecated": True, "new_param": "names", "new_param_fn": lambda name: [name]}


class Section(DeepSpeedConfigModel):
    count: int = 0
    name_old: str | None = Field(default=None, json_schema_extra=REPLACED)
    names: list[str] | None = None
    size: int = Field(default=7, alias="size_alias")


def section(**values: Any) -> Any:
    return Section(**values)


def fp16(**values: Any) -> DeepSpeedFP16Config:
    return DeepSpeedFP16Config(**values)


def test_a_section_of_a_scripts_own_refuses_and_renames() -> None:
    assert section(count=3).count == 3
    assert section(name_old="a").names == ["a"]
    assert (section(size=1).size, section(size_alias=1).size, section(size="auto").size) == (1, 1, 7)
    for wrong in ({"count": "many"}, {"names": "a"}, {"cuont": 1}):
        with pytest.raises(ValidationError):
            section(**wrong)
    with pytest.raises(AssertionError, match="leave out name_old"):
        section(name_old="a", names=["a"])


def test_the_precision_sections_are_objects() -> None:
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert not get_bfloat16_config({}).enabled
    assert get_float16_config({"fp16": {"loss_scale": "3"}}).loss_scale == 3
    for scale in (-1, float("inf"), float("nan"), True, [], {}):
        with pytest.raises(ValidationError, match="must be a number"):
            fp16(loss_scale=scale)


@pytest.mark.parametrize("name", ["loss_scale_window", "min_loss_scale"])
def test_what_concerns_the_dynamic_scale_is_checked_where_there_is_one(name: str) -> None:
    for value in (0, -1, True, None, "abc", float("inf")):
        given: dict[str, Any] = {name: value}
        with pytest.raises(ValidationError):
            fp16(enabled=True, **given)
    for other in ({"enabled": True, "loss_scale": 128}, {"enabled": False}):
        assert getattr(fp16(**other, **{name: -1}), name) == -1


def test_the_elastic_batch_of_a_config_is_computed_without_a_model() -> None:
    batch, sizes = compute_elastic_config({"elasticity": ELASTIC}, "0.19.8")
    assert batch <= 64
    assert all(any(batch // ranks % micro == 0 for micro in (2, 3)) for ranks in sizes)
    assert compute_elastic_config({"elasticity": ELASTIC}, "0.19.8", world_size=sizes[0])[:2] == (batch, sizes)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="does not allow 1000 ranks"):
        compute_elastic_config({"elasticity": ELASTIC}, "0.19.8", world_size=1000)
    assert issubclass(ElasticityError, ConfigError)


@pytest.mark.parametrize(
    "change",
    [
        {"enabled": False},
        {"version": "0.3"},
        {"max_train_batch_size": None},
        {"micro_batch_sizes": [2, -1]},
        {"micro_batch_sizes": ["a"]},
        {"min_gpus": -1},
        {"model_parallel_size": 4},
    ],
)
def test_a_wrong_elasticity_section_is_an_error_of_its_own(change: dict[str, Any]) -> None:
    changed = {name: value for name, value in (ELASTIC | change).items() if value is not None}
    with pytest.raises(ElasticityError, match="elasticity"):
        compute_elastic_config({"elasticity": changed}, "0.19.8")
    with pytest.raises(ElasticityError, match=r"0\.3\.8 is the first"):
        compute_elastic_config({"elasticity": ELASTIC}, "0.2")


def test_a_list_of_cores_rises() -> None:
    assert parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    for wrong in ("0,2-6,5-9", "8,2-6", "6-2", "a"):
        with pytest.raises(ValueError, match=r"rise|invalid"):
            parse_range_list(wrong)


def test_the_config_is_found_under_its_oldest_name_and_says_how_gradients_are_reduced() -> None:
    config = {"train_batch_size": 1, "gradient_allreduce_op": "SUM", "optimizer": {"type": "Adam"}}
    assert deepspeed.DeepSpeedConfig(config).gradient_allreduce_op == "sum"
    engine, *_ = deepspeed.initialize(args=argparse.Namespace(deepscale_config=config), model=nn.Linear(2, 2))
    assert engine.train_batch_size() == 1
    engine.destroy()


def test_deepspeeds_names_for_what_is_not_supported_stand_in_the_error() -> None:
    named = {
        "ZenFlow": {"zero_optimization": {"stage": 2, "zenflow": {}}},
        "DeepCompile": {"compile": {"deepcompile": True}},
    }
    for name, section in named.items():
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=f"not built yet; .*not supported with {name}"):
            deepspeed.DeepSpeedConfig({"train_batch_size": 1, **section})
