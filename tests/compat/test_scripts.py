"""What training scripts written for DeepSpeed ask of the engine and of single parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.distributed import run_ranks

deepspeed = pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))

    @property
    def broken(self) -> int:
        """A property whose own code asks for what is not there."""
        return self.nowhere  # type: ignore[return-value]


def _config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def _start(stage: int, **more: Any) -> tuple[Any, Net]:
    torch.manual_seed(0)
    net = Net()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=_config(stage, **more))
    return engine, net


def _frozen(rank: int, world: int) -> None:
    for stage in range(4):
        for low in ({}, {"bf16": {"enabled": True}}):
            torch.manual_seed(0)
            net = Net()
            net.first.requires_grad_(False)
            trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
            deepspeed.initialize(model=net, model_parameters=trained, config=_config(stage, **low))
            for call in ("full_fp32_param", "local_fp32_param", "full_grad", "local_grad"):
                assert getattr(deepspeed.utils, f"safe_get_{call}")(net.first.weight) is None, call
            assert deepspeed.utils.safe_get_full_optimizer_state(net.first.weight, "momentum_buffer") is None
            whole = deepspeed.utils.safe_get_full_fp32_param(net.second.weight)
            assert whole.shape == (4, 8)
            assert deepspeed.utils.safe_get_local_fp32_param(net.second.weight).numel() <= whole.numel()


def test_frozen_parameters_have_no_float32_value_gradient_or_state() -> None:
    run_ranks(2, _frozen)


def _missing(rank: int, world: int) -> None:
    engine, _ = _start(3)
    words = r"zeroshard's DeepSpeedEngine has no attribute 'curriculum', nor has the model that it trains \(Net\)"
    with pytest.raises(AttributeError, match=words):
        _ = engine.curriculum
    assert getattr(engine, "curriculum", None) is None
    assert engine.second is engine.module.second
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'broken'"):  # as without an engine
        _ = engine.broken


def test_a_missing_attribute_is_one_of_the_engine_not_of_the_model() -> None:
    run_ranks(1, _missing)
