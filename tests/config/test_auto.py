""" "auto" is resolved by an override or by a rule that the origin names, or it is an error that names the key."""

from __future__ import annotations

from typing import Any

import pytest

from zeroshard.config import Config, load_config
from zeroshard.errors import ConfigError

TRAINER = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
}


def load(overrides: dict[str, Any] | None = None, **config: Any) -> Config:
    return load_config({"train_batch_size": 8, **config}, world_size=2, overrides=overrides)


def test_a_trainers_config_full_of_auto_is_filled_from_its_arguments() -> None:
    overrides = {
        "bf16.enabled": True,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"params": {"lr": 3e-4, "weight_decay": 0.1}},
        "scheduler.params.warmup_num_steps": 50,
        "zero_optimization.stage3_prefetch_bucket_size": 1234,
        "gradient_clipping": 0.5,
    }
    config = load_config(TRAINER, world_size=2, overrides=overrides)
    assert config.precision.compute == "bf16"
    assert config.batch.train == 16
    assert config.zero.prefetch_bucket_size == 1234
    assert config.zero.param_persistence_threshold == 100_000
    assert config.gradient_clipping == 0.5
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert dict(config.optimizer.params) | {"lr": 3e-4, "weight_decay": 0.1, "eps": 1e-8} == config.optimizer.params
    assert config.scheduler.params["warmup_max_lr"] is None
    assert config.origins["optimizer.params.lr"] == "override"
    assert config.origins["zero_optimization.prefetch_bucket_size"] == "override as stage3_prefetch_bucket_size"
    assert config.origins["zero_optimization.param_persistence_threshold"].startswith("auto: default (config")
    assert config.origins["zero_optimization.reduce_bucket_size"].startswith("auto: default (config")
    assert config.origins["fp16.enabled"] == "auto: bf16.enabled is true (config)"
    assert config.origins["scheduler.params.warmup_max_lr"] == "auto: the optimizer's rate (config)"
    assert config.origins["train_batch_size"] == "auto: derived: 2 x 4 accumulation x 2 ranks"


def test_without_arguments_the_keys_that_nothing_resolves_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(TRAINER, world_size=2)
    named = {problem.split(" ")[0] for problem in caught.value.problems}
    assert named == {
        "bf16.enabled",
        "fp16.enabled",
        "optimizer.params.lr",
        "scheduler.params.warmup_num_steps",
        "train_micro_batch_size_per_gpu:",
    }


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": {"enabled": True, "initial_scale_power": "auto"}},
        {"optimizer": {"type": "auto"}},
        {"zero_optimization": {"offload_optimizer": {"device": "auto"}}},
        {"gradient_allreduce_op": "auto"},
    ],
)
def test_auto_without_a_rule_is_an_error_that_says_how_to_give_a_value(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r'is "auto" and nothing gives it a value; .* pass overrides=') as caught:
        load(**config)
    assert len(caught.value.problems) == 1


def test_auto_is_a_value_where_the_key_says_so() -> None:
    assert load(data_types={"keep_in_fp32_modules": "auto"}).precision.keep_in_fp32_modules == "auto"


def test_an_override_fills_an_absent_key_and_is_checked_like_any_value() -> None:
    assert load({"zero_optimization": {"stage": 2}}).zero.stage == 2
    with pytest.raises(ConfigError, match=r'stage \(override\): must be "auto" or a whole number'):
        load({"zero_optimization.stage": 7})
    with pytest.raises(ConfigError, match=r"zero_optimization\.stages \(override\): unknown key"):
        load({"zero_optimization.stages": 2})


def test_an_override_that_contradicts_a_written_value_is_refused_and_an_equal_one_is_not() -> None:
    load({"gradient_clipping": 0.5}, gradient_clipping=0.5)
    with pytest.raises(ConfigError, match=r"the config says 0.5 but the script's arguments say 1.0"):
        load({"gradient_clipping": 1.0}, gradient_clipping=0.5)


def test_overrides_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="contradicts another override"):
        load({"optimizer": "Adam", "optimizer.params.lr": 1e-4})
