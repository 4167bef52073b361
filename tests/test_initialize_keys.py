"""`initialize` obeys single keys of the config."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.test_initialize import CONFIG, start, train
from zeroshard.config import load_config
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
        assert all("rate 0.01, gradient norm " in text and text.endswith(", 0 skipped") for text in told)


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
