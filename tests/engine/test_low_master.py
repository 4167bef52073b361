"""16-bit parameters without master weights: updated in float32 arithmetic and rounded, bit for bit as a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.config import load_config
from zeroshard.errors import ConfigError, PlanError
from zeroshard.plan.dtypes import torch_dtype

STEPS = 4
BF16 = {"enabled": True, "bf16_master_weights_and_grads": True}
FP16 = {"enabled": True, "fp16_master_weights_and_grads": True, "loss_scale": 8.0}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(_batch(step, rank).to(next(model.parameters()).dtype)).float().square().mean()


def _start(precision: dict[str, Any], stage: int, optimizer: str = "AdamW", **keys: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {
            "type": optimizer,
            "params": {"lr": 1e-2} | ({} if optimizer == "Lamb" else {"weight_decay": 0.1}),
        },
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
        "gradient_clipping": 0,
        **precision,
        **keys,
    }
    return zeroshard.initialize(model=_model(), config=config)[0]


def _expected(dtype: torch.dtype, state: torch.dtype, ranks: int, kind: type, scale: float) -> dict[str, torch.Tensor]:
    """The same on one rank: torch's optimizer in float32, whose results are rounded after each step."""
    model = _model().to(dtype)
    names = dict(model.named_parameters())
    moments: dict[str, dict[str, Any]] = {name: {} for name in names}
    for step in range(STEPS):
        sums = {name: torch.zeros_like(parameter) for name, parameter in names.items()}
        for rank in range(ranks):
            model.zero_grad()
            (_loss(model, step, rank) * scale).backward()
            for name, parameter in names.items():
                assert parameter.grad is not None
                sums[name] += parameter.grad
        for name, parameter in names.items():
            value = nn.Parameter(parameter.detach().float())
            plain = kind([value], lr=1e-2, weight_decay=0.1, foreach=False)
            if moments[name]:
                plain.state[value] = {key: part.float() for key, part in moments[name].items()}
            value.grad = sums[name].float() * (1.0 / (ranks * scale))
            plain.step()
            moments[name] = {
                key: part if part.dim() == 0 else part.to(state) for key, part in plain.state[value].items()
            }
            parameter.data.copy_(value.data)
    return {name: parameter.detach() for name, parameter in names.items()}


def _trained(rank: int, world_size: int, precision: dict[str, Any], stage: int, optimizer: str) -> dict[str, Any]:
    engine = _start(precision, stage, optimizer)
    for step in range(STEPS):
        engine.backward(_loss(engine, step, rank))
        engine.step()
    found = dict(zeroshard.iterate_full_parameters(engine.module))
    groups = [group for _, group in engine.plan.groups()]
    assert all(group.master is None for group in groups)
    kinds = {group.moments.dtype for group in groups if group.moments is not None}
    engine.destroy()
    return {"values": found, "kinds": kinds}


def _trained_at_every_stage(
    rank: int, world_size: int, precision: dict[str, Any], optimizer: str
) -> list[dict[str, Any]]:
    return [_trained(rank, world_size, precision, stage, optimizer) for stage in range(4)]


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ({"bf16": BF16}, "AdamW"),
        ({"bf16": {**BF16, "bf16_optimizer_states": True}}, "Adam"),
        ({"bf16": BF16}, "SGD"),
        ({"fp16": FP16}, "AdamW"),
    ],
)
def test_a_run_without_master_weights_equals_a_plain_loop_at_every_stage(
    precision: dict[str, Any], optimizer: str
) -> None:
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16
    low_state = bool(precision.get("bf16", {}).get("bf16_optimizer_states"))
    told = run_ranks(2, _trained_at_every_stage, precision, optimizer)
    kind = torch.optim.SGD if optimizer == "SGD" else torch.optim.AdamW  # which DeepSpeed's Adam is, too
    state = dtype if low_state else torch.float32
    scale = 8.0 if dtype is torch.float16 else 1.0
    expected = _expected(dtype, state, 2, kind, scale)
    for stage, found in enumerate(told[0]):
        for name, value in found["values"].items():
            assert value.dtype is dtype
            assert torch.equal(value.cpu(), expected[name]), (stage, name)
        assert {torch_dtype(name) for name in found["kinds"]} <= {state}


def _resumed(rank: int, world_size: int, base: str) -> None:
    precision = {"bf16": {**BF16, "bf16_optimizer_states": True}}
    first = _start(precision, 2)
    for step in range(2):
        first.backward(_loss(first, step, rank))
        first.step()
    first.save_checkpoint(base)
    second = _start(precision, 3)
    second.load_checkpoint(base)
    for step in range(2, 4):
        for engine in (first, second):
            engine.backward(_loss(engine, step, rank))
            engine.step()
    values = [dict(zeroshard.iterate_full_parameters(engine.module)) for engine in (first, second)]
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    with_masters = _start({"bf16": {"enabled": True}}, 1)
    with_masters.load_checkpoint(base)  # float32 holds what bf16 does
    for engine in (first, second, with_masters):
        engine.destroy()


def test_a_checkpoint_without_master_weights_goes_on_at_other_stages_and_with_them(tmp_path: Path) -> None:
    run_ranks(2, _resumed, str(tmp_path))


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (
            {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
            r"bf16\.bf16_optimizer_states .* needs bf16_master",
        ),
        ({"bf16": {**BF16, "enabled": False}}, r"bf16\.bf16_master_weights_and_grads .* bf16\.enabled is not"),
        ({"fp16": {**FP16, "enabled": False}}, r"fp16\.fp16_master_weights_and_grads .* fp16\.enabled is not"),
        (
            {"bf16": BF16, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            r"bf16_master_weights_and_grads .* not built yet with offload_optimizer",
        ),
    ],
)
def test_what_master_weights_in_16_bits_can_not_be_combined_with_is_refused(config: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        load_config({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, **config}, world_size=1)


def test_an_optimizer_that_needs_master_weights_is_named() -> None:
    with pytest.raises(PlanError, match="no master weights, which Lamb needs"):
        _start({"bf16": BF16}, 1, "Lamb")
    config = {"train_batch_size": 4, "bf16": BF16}
    model = _model()
    with pytest.raises(PlanError, match="no master weights, which Adadelta needs"):
        zeroshard.initialize(model=model, optimizer=torch.optim.Adadelta(model.parameters()), config=config)
