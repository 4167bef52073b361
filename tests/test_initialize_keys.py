"""`initialize` obeys single keys of the config."""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.test_initialize import CONFIG, parameters, start, train
from zeroshard.config import load_config
from zeroshard.errors import ConfigError
from zeroshard.plan.placement import Tier
from zeroshard.recipes import recipe_of


@pytest.mark.parametrize(
    ("keys", "divided_by"),
    [
        ({}, 1.0),
        ({"gradient_predivide_factor": 2}, 2.0),
        ({"prescale_gradients": True}, 4.0),
        ({"prescale_gradients": True, "gradient_predivide_factor": 2}, 4.0),
    ],
)
def test_gradients_are_divided_before_the_reduction_as_the_config_says(keys: Any, divided_by: float) -> None:
    assert recipe_of(load_config({**CONFIG, **keys}, world_size=4), ()).policy.predivide == divided_by


def test_progress_is_printed_as_often_as_the_config_says(capsys: pytest.CaptureFixture[str]) -> None:
    for every, expected in ((2, [2, 4]), (None, [])):
        engine, _ = start({**CONFIG, "steps_per_print": every})
        train(engine, 5)
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
        assert [text.partition(":")[0] for text in told] == [f"step {step}" for step in expected]
        pattern = r"step \d: rate 0.01, gradient norm [\d.]+, 0 skipped, [\d.e+]+ samples/s"
        assert all(re.fullmatch(pattern, text) for text in told), told


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("deferred", [False, True])
def test_floating_point_buffers_have_the_dtype_of_the_config(stage: int, deferred: bool, tmp_path: Path) -> None:
    def normed() -> nn.Module:
        with zeroshard.Init() if deferred else nullcontext():
            model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6))
            model[2].register_buffer("running_mean", model[1].running_mean)
        return model

    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    for wanted, dtype in (({"data_types": {"buffer_dtype": "bf16"}}, torch.bfloat16), ({}, torch.float32)):
        model = normed()
        engine, *_ = zeroshard.initialize(model=model, config={**config, **wanted})
        assert {name: buffer.dtype for name, buffer in model.named_buffers()} == {
            "1.running_mean": dtype,
            "1.running_var": dtype,
            "1.num_batches_tracked": torch.int64,
            "2.running_var": dtype,
            "2.num_batches_tracked": torch.int64,
        }
        assert torch.equal(model[1].running_var, torch.ones(6, dtype=dtype))
        if wanted:
            engine.save_checkpoint(tmp_path / "saved")
        else:
            engine.load_checkpoint(tmp_path / "saved")
        engine.destroy()


def test_the_log_level_is_that_of_the_config() -> None:
    logger = logging.getLogger("zeroshard")
    before = logger.level
    try:
        for level in ("debug", "ERROR"):
            start({**CONFIG, "log_level": level})
            assert logger.level == getattr(logging, level.upper())
        start(CONFIG)
        assert logger.level == logging.ERROR  # a config that says nothing leaves it
    finally:
        logger.setLevel(before)
    with pytest.raises(ConfigError, match="log_level"):
        start({**CONFIG, "log_level": "loud"})


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("checked", [True, False])
def test_bf16_gradients_with_nan_are_skipped_or_applied_as_the_config_says(stage: int, checked: bool) -> None:
    section = {"enabled": True, "check_grad_overflow": checked}
    engine, _ = start({**CONFIG, "bf16": section, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0})
    loss = engine(torch.full((4, 6), float("nan"))).float().square().mean()
    engine.backward(loss)
    engine.step()
    assert engine.was_step_applied() is not checked
    assert engine.skipped_steps == int(checked)
    assert all(bool(value.isnan().any()) is not checked for value in parameters(engine).values())


@pytest.mark.parametrize("flag", [1, True])
def test_1_is_true_for_a_switch(flag: Any) -> None:
    class Foreign(torch.optim.SGD):
        """An optimizer that zeroshard does not know."""

    config = {"train_batch_size": 4, "zero_allow_untested_optimizer": flag, "bf16": {"enabled": 0}}
    model = nn.Linear(6, 3)
    engine, *_ = zeroshard.initialize(model=model, optimizer=Foreign(model.parameters(), lr=0.1), config=config)
    assert engine.plan.policy.cast_inputs is None
    engine.destroy()


def test_parameters_rest_in_host_memory_where_nothing_is_trained() -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    x = torch.randn(2, 6)
    expected = model(x)
    with pytest.warns(zeroshard.errors.ZeroShardWarning, match="run forward only"):
        engine, *_ = zeroshard.initialize(model=model, config=config)
    assert all(group.param.tier is Tier.HOST for _, group in engine.plan.groups())
    for _ in range(2):
        assert torch.equal(engine(x), expected)
    engine.destroy()


def test_parameters_in_host_memory_take_the_state_along_and_have_no_effect_below_stage_3() -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "param_persistence_threshold": 0}
    with pytest.warns(zeroshard.errors.ZeroShardWarning, match=r"offload_param\.device .* optimizer's state .* too"):
        config = load_config({**CONFIG, "zero_optimization": zero}, world_size=1)
    assert config.zero.offload is not None
    assert (config.zero.offload.ratio, config.zero.offload.param) == (1.0, True)
    for stage in (0, 1, 2):
        with pytest.warns(zeroshard.errors.ZeroShardWarning, match=rf"offload_param\.device .* at stage {stage}"):
            config = load_config({**CONFIG, "zero_optimization": {**zero, "stage": stage}}, world_size=1)
        assert config.zero.offload is None


@pytest.mark.parametrize("every", [2, None])
def test_the_time_of_the_parts_of_a_step_is_printed_where_it_is_asked_for(
    every: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, _ = start({**CONFIG, "wall_clock_breakdown": True, "steps_per_print": every})
    train(engine, 5)
    told = [line for line in capsys.readouterr().out.splitlines() if "forward" in line]
    pattern = r"step (\d): forward (\S+) ms, backward (\S+) ms, step (\S+) ms \(mean of (\d) steps?\)"
    found = [re.fullmatch(pattern, line) for line in told]
    assert [(line and line[1], line and line[5]) for line in found] == (
        [(str(step), "1") for step in (1, 2, 3, 4, 5)] if every is None else [("2", "2"), ("4", "2")]
    )
    assert all(line is not None and min(float(line[part]) for part in (2, 3, 4)) > 0 for line in found)
    engine, _ = start(CONFIG)
    train(engine, 2)
    assert "forward" not in capsys.readouterr().out
