"""Optimizers and schedules: which types are built, their parameters, and what replaces them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from zeroshard.config import Config, load_config
from zeroshard.config.components import SCHEDULERS, UNBUILT_OPTIMIZERS
from zeroshard.config.torch_schedules import TORCH_SCHEDULERS
from zeroshard.errors import ConfigError, ZeroShardWarning
from zeroshard.optim.schedules.named import SCHEDULES, TORCH_SCHEDULES


def load(**config: Any) -> Config:
    return load_config({"train_batch_size": 2, **config}, world_size=2)


def problem_of(**config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**config)
    (problem,) = caught.value.problems
    return problem


def optimizer(type_: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": type_, "params": params}}


def scheduler(type_: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": type_, "params": params}}


@pytest.mark.parametrize(
    ("written", "type_", "decoupled"),
    [("Adam", "Adam", True), ("adamw", "AdamW", True), ("DeepSpeedCPUAdam", "Adam", True), ("ADAM", "Adam", True)],
)
def test_adam_is_known_in_any_case_and_under_its_alias(written: str, type_: str, decoupled: bool) -> None:
    config = load(**optimizer(written, lr=1e-4, betas=[0.9, 0.95]))
    assert config.optimizer is not None
    assert config.optimizer.type == type_
    assert config.optimizer.params["adam_w_mode"] is decoupled
    assert config.optimizer.params["betas"] == (0.9, 0.95)
    assert config.optimizer.params["eps"] == 1e-8


def test_the_adam_of_the_textbook_needs_adam_w_mode_off() -> None:
    config = load(**optimizer("Adam", adam_w_mode=False))
    assert config.optimizer is not None
    assert config.optimizer.params["adam_w_mode"] is False
    assert "for the other kind write type Adam" in problem_of(**optimizer("AdamW", adam_w_mode=False))


@pytest.mark.parametrize(
    ("type_", "written", "decay"),
    [
        ("AdamW", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0.0),
        ("AdamW", {"torch_adam": True, "weight_decay": 0}, 0.0),
        ("AdamW", {"torch_adam": False}, 0.0),
    ],
)
def test_torch_adam_decays_as_torch_does_where_no_decay_is_written(
    type_: str, written: dict[str, Any], decay: float
) -> None:
    """The values of `engine.optimizer.param_groups` under DeepSpeed 0.19.8 on the CPU, stages 0, 1 and 3."""
    config = load(**optimizer(type_, **written))
    assert config.optimizer is not None
    assert config.optimizer.params["weight_decay"] == decay


def test_sgd_takes_its_own_parameters() -> None:
    config = load(**optimizer("SGD", lr=0.1, momentum=0.9, nesterov=True))
    assert config.optimizer is not None
    assert dict(config.optimizer.params) == {
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": True,
    }
    assert "needs a momentum above 0" in problem_of(**optimizer("SGD", nesterov=True))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (optimizer("Adam", lr="1e-4"), 'lr (config): must be a number of at least 0, not "1e-4"'),
        (optimizer("Adam", lr=-1), "lr (config): must be a number of at least 0, not -1"),
        (optimizer("Adam", betas=[0.9]), "betas (config): must be a list of two numbers"),
        (optimizer("Adam", betas=[0.9, 1.0]), "betas[1] (config): must be a number of at least 0 and below 1, not 1"),
        (optimizer("Adam", amsgrad=True), "amsgrad is not built yet"),
        (optimizer("Adam", learning_rate=1), "unknown parameter; did you mean lr?"),
        (optimizer("Adam", weight_deca=1), "unknown parameter; did you mean weight_decay?"),
        (optimizer("Adam", momentum=0.9), "unknown parameter; the parameters are lr, betas"),
        (optimizer("AdamW", max_grad_norm=1.0), "did you mean the top-level key gradient_clipping?"),
        (optimizer("Adma"), 'unknown type "Adma"; did you mean Adam?'),
        (optimizer("xyz"), 'unknown type "xyz"; use one of Adam, AdamW, SGD, Adagrad'),
        (
            {"optimizer": {"type": 3}},
            "must be one of Adam, AdamW, SGD, Adagrad, Lion, RMSprop, Lamb, Muon, Dion, OneBitAdam, OneBitLamb, "
            "ZeroOneAdam, Adam8bit, AdamW8bit, Adam4bit, AdamW4bit, not 3",
        ),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type: is missing, but optimizer.params.lr"),
        ({"optimizer": {"params": {}}}, "optimizer.type (config): is missing, but params is there; name the type"),
        ({"scheduler": {"params": {}}}, "scheduler.type (config): is missing, but params is there"),
        (optimizer("Lion", eps=1e-8), "unknown parameter; the parameters are lr, betas, weight_decay"),
        (optimizer("Lamb", max_grad_norm=1.0), "must be 0 (clip by the top-level key gradient_clipping), not 1"),
        (
            optimizer("Lamb", min_coeff=2, max_coeff=1),
            "min_coeff (config): must be at most max_coeff, which is 1, not 2",
        ),
        (optimizer("Muon", ns_method="svd"), '"gram" or "standard", not "svd"'),
        (optimizer("Dion", rank_fraction=0), "must be a number above 0, and at most 1, not 0"),
        (optimizer("Dion", mu=-0.1), "must be a number of at least 0"),
        (
            {**optimizer("OneBitAdam"), "gradient_clipping": 1.0},
            "gradient_clipping (config): must be 0 with OneBitAdam: after its warm-up",
        ),
        (
            {**optimizer("OneBitLamb"), "zero_optimization": {"stage": 2}},
            "stage (config): is 2, but OneBitLamb needs the whole gradients on each rank; use 0 or 1",
        ),
        (optimizer("OneBitAdam", freeze_step=0), "must be a whole number of at least 1, not 0"),
        (scheduler("WarmupDecayLR"), "total_num_steps: is missing; WarmupDecayLR needs it"),
        (scheduler("WarmupCosineLR", total_num_steps=0), "must be a whole number of at least 1, not 0"),
        (scheduler("WarmupLR", warmup_type="cubic"), '"log" or "linear", not "cubic"'),
        (scheduler("WarmupLR", total_num_steps=3), "unknown parameter"),
        (scheduler("WarmupLR", warmup_min_lr=None), "must be a number of at least 0, not null"),
        (scheduler("WarmupLR", warmup_min_lr=[0, "x"]), 'must be a number of at least 0, not "x"'),
        (optimizer("Adam", lr=None), "lr (config): must be a number of at least 0, not null"),
        (scheduler("OneCycle", cycle_max_lr=1), "cycle_min_lr: is missing; OneCycle needs it"),
        (scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_max_mom=1), "cycle_max_mom (config): must be"),
        (scheduler("LRRangeTest", lr_range_test_step_size=0), "must be a whole number of at least 1, not 0"),
        (scheduler("CosineAnnealing"), 'unknown type "CosineAnnealing"; did you mean CosineAnnealingLR?'),
        (scheduler("StepLR"), "step_size: is missing; StepLR needs it"),
        (
            scheduler("MultiStepLR", milestones=3),
            "milestones (config): must be a list of whole numbers such as [30, 80]",
        ),
        (scheduler("MultiStepLR", milestones=[1.5]), "must be a whole number of at least 0, not 1.5"),
        (scheduler("OneCycleLR", max_lr=1.0, total_step=3), "unknown parameter; did you mean total_steps?"),
        (scheduler("LinearLR", start_factor=0), "must be a number above 0 and at most 1, not 0"),
    ],
)
def test_a_wrong_parameter_or_type_is_named(config: dict[str, Any], words: str) -> None:
    assert words in problem_of(**config)


DEFAULTS: dict[str, dict[str, Any]] = {
    "Adagrad": {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "RMSprop": {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
    "Lamb": {
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "eps_inside_sqrt": False,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
        "amsgrad": False,
    },
    "Muon": {
        "lr": None,
        "momentum": 0.95,
        "weight_decay": 0.0,
        "muon_lr": None,
        "adam_lr": None,
        "betas": (0.9, 0.95),
        "eps": 1e-10,
        "ns_method": "gram",
    },
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_optimizer_has_the_names_and_defaults_of_deepspeed(name: str) -> None:
    """Those of DeepSpeed 0.19.8: of `param_groups` after an initialize without params, on the CPU.

    Lion's are from state in host memory, of Lamb and the 1-bit ones, which want a GPU, from their signatures.
    """
    config = load(**optimizer(name.lower()))
    assert config.optimizer is not None
    assert (config.optimizer.type, dict(config.optimizer.params)) == (name, DEFAULTS[name])


def test_a_one_bit_optimizer_does_not_clip_unless_told_to_which_is_an_error() -> None:
    config = load(**optimizer("OneBitAdam", freeze_step=5, comm_backend_name="mpi", cuda_aware=True))
    assert config.gradient_clipping == 0.0
    assert "can't clip" in config.origins["gradient_clipping"]
    assert load(**optimizer("OneBitAdam"), gradient_clipping=0).gradient_clipping == 0.0
    assert load(**optimizer("Lamb")).gradient_clipping == 1.0


@pytest.mark.parametrize(
    ("alias", "name"),
    [("FusedLamb", "Lamb"), ("FusedLion", "Lion"), ("DeepSpeedCPUAdagrad", "Adagrad"), ("MuonAdamW", "Muon")],
)
def test_an_alias_of_an_optimizer_is_that_optimizer(alias: str, name: str) -> None:
    config = load(**optimizer(alias))
    assert config.optimizer is not None
    assert config.optimizer.type == name


@pytest.mark.parametrize("name", UNBUILT_OPTIMIZERS)
def test_a_known_optimizer_that_is_not_built_is_refused_by_name(name: str) -> None:
    assert f"{name} is not built yet" in problem_of(**optimizer(name, any_parameter=1))


def test_a_cycle_fills_in_what_its_halves_share() -> None:
    config = load(**scheduler("onecycle", cycle_min_lr=0.1, cycle_max_lr=[0.5, 1], cycle_first_step_size=5e2))
    assert config.scheduler is not None
    assert config.scheduler.type == "OneCycle"
    assert config.scheduler.params["cycle_max_lr"] == (0.5, 1.0)
    assert config.scheduler.params["cycle_first_step_size"] == 500
    assert config.scheduler.params["cycle_second_step_size"] is None
    assert config.scheduler.params["cycle_min_mom"] == 0.8


@pytest.mark.parametrize("written", ["WarmupCosineLR", "Cosine", "cosine"])
def test_cosine_is_warmup_cosine(written: str) -> None:
    config = load(**scheduler(written, total_num_steps=2000))
    assert config.scheduler is not None
    assert config.scheduler.type == "WarmupCosineLR"
    assert dict(config.scheduler.params) == {
        "total_num_steps": 2000,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
        "last_batch_iteration": -1,
    }


@pytest.mark.parametrize(("type_", "rate"), [("WarmupLR", None), ("WarmupDecayLR", 1e-3)])
def test_the_top_of_a_warm_up_is_the_optimizers_rate_or_the_default_of_the_type(type_: str, rate: float | None) -> None:
    total = {"total_num_steps": 2000} if type_ == "WarmupDecayLR" else {}
    for params, expected in [
        ({}, rate),
        ({"warmup_max_lr": None}, None),
        ({"warmup_max_lr": 1}, 1.0),
        ({"warmup_max_lr": [0.1, 1]}, (0.1, 1.0)),
    ]:
        config = load(**scheduler(type_, **total, **params))
        assert config.scheduler is not None
        assert config.scheduler.params["warmup_max_lr"] == expected


def test_the_scripts_own_optimizer_and_schedule_replace_the_configs_with_a_warning() -> None:
    config = {"train_batch_size": 2, **optimizer("MuAdam"), **scheduler("OneCycle")}
    with pytest.warns(ZeroShardWarning) as warned:
        loaded = load_config(config, world_size=2, client_optimizer=True, client_scheduler=True)
    assert (loaded.optimizer, loaded.scheduler) == (None, None)
    assert [str(warning.message).split(" ")[0] for warning in warned] == ["optimizer", "scheduler"]


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
def test_a_number_that_float32_can_not_hold_is_refused(name: str) -> None:
    assert f"optimizer.params.{name} (config): must be a number of at least 0 that float32 can hold" in problem_of(
        **optimizer("AdamW", **{name: 1e300})
    )


@pytest.mark.parametrize("name", TORCH_SCHEDULERS)
def test_a_schedule_of_torch_has_torchs_parameters_and_defaults(name: str) -> None:
    theirs = dict(inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters)
    for left_out in ("optimizer", "last_epoch", "verbose", "scale_fn", "scale_mode"):
        theirs.pop(left_out, None)
    ours = TORCH_SCHEDULERS[name].model_fields
    assert {key: one.default for key, one in theirs.items() if one.default is not one.empty} == {
        key: field.default for key, field in ours.items() if not field.is_required()
    }
    assert list(theirs) == list(ours)


def test_the_schedules_that_a_config_may_name_are_those_that_are_built() -> None:
    assert set(SCHEDULERS) == {*SCHEDULES, *TORCH_SCHEDULES} - {"Cosine"}
