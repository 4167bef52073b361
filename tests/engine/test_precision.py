"""Low precision: fp32 masters, the loss scale, non-finite gradients, and the dtypes of wire and accumulator."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.models import TRANSFORMER, WIDTH, Batch, language_loss, square_loss
from tests.support.training import (
    Setting,
    Task,
    assert_close,
    assert_same,
    build,
    full_parameters,
    shard_task,
    train_reference,
)
from tests.support.zoo import Stack
from zeroshard.engine.engine import Engine
from zeroshard.errors import NonFiniteError
from zeroshard.plan.builder import Precision, Recipe
from zeroshard.plan.placement import STAGES
from zeroshard.plan.policy import ExecutionPolicy

ALL = (0, 1, 2, 3)
STACK = Task(Stack, square_loss)
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}}


def config(stage: int, world: int, micro: int = 1, **entries: Any) -> dict[str, Any]:
    """A DeepSpeed config for `world` ranks."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro,
        "train_batch_size": micro * world,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": ADAMW,
        **entries,
    }


def engine_for(model: nn.Module, settings: dict[str, Any]) -> Engine:
    """The engine that initialize makes."""
    return zeroshard.initialize(model=model, config=settings)[0]


def _train(engine: Engine, task: Task, rank: int, steps: int, micro: int = 1) -> list[float]:
    losses = []
    for step in range(steps):
        for index in range(micro):
            loss = task.loss(engine, Batch(step, index, rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def _bf16(rank: int, world: int) -> None:
    reference = train_reference(TRANSFORMER, Setting(steps=8), world, rank)
    first: dict[str, torch.Tensor] = {}
    for stage in ALL:
        engine = engine_for(build(TRANSFORMER), config(stage, world, bf16={"enabled": True}))
        losses = _train(engine, TRANSFORMER, rank, 8)
        assert losses == pytest.approx(reference.losses, abs=0.02)
        parameters = full_parameters(engine.module)
        assert any(not torch.equal(value, value.bfloat16().float()) for value in parameters.values()), "an fp32 master"
        assert_close(parameters, reference.parameters, 8 * 2e-3, f"stage {stage}: within a few steps' length")
        first = first or parameters
        assert_same(parameters, first, f"stage {stage} against 0")
        dtypes = {parameter.dtype for parameter in engine.module.parameters()}
        assert dtypes == {torch.bfloat16}
        assert engine.loss_scale == 1.0


def test_bf16_keeps_an_fp32_master_and_all_stages_agree() -> None:
    run_ranks(2, _bf16)


def _fp16(rank: int, world: int) -> None:
    reference = train_reference(STACK, Setting(steps=6), world, rank)
    for stage in ALL:
        fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
        engine = engine_for(build(STACK), config(stage, world, fp16=fp16, gradient_clipping=0.0))
        scales = []
        for step in range(6):
            _train_one(engine, Batch(step, 0, rank))
            scales.append(engine.loss_scale)
            assert engine.was_step_applied()
            norm = engine.get_global_grad_norm()
            assert norm == pytest.approx(reference.norms[step], rel=0.02), "unscaled and averaged"
        assert scales == [256, 256, 512, 512, 1024, 1024]
        assert_close(full_parameters(engine.module), reference.parameters, 6e-3, f"stage {stage}")


def _train_one(engine: Engine, batch: Batch, factor: float = 1.0) -> None:
    engine.backward(square_loss(engine, batch) * factor)
    engine.step()


def test_fp16_trains_and_its_scale_grows() -> None:
    run_ranks(2, _fp16)


def _overflow(rank: int, world: int) -> list[str]:
    records: list[str] = []

    class _Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("zeroshard").addHandler(_Keep())
    for stage in ALL:
        fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "min_loss_scale": 64}
        settings = config(stage, world, fp16=fp16, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 9}})
        engine = engine_for(build(STACK), settings)
        _train_one(engine, Batch(0, 0, rank))
        before, rate = full_parameters(engine.module), engine.get_lr()
        scales = []
        for _ in range(5):
            _train_one(engine, Batch(1, 0, rank), 1e6 if rank == world - 1 else 1.0)  # on one rank alone
            assert not engine.was_step_applied()
            scales.append(engine.loss_scale)
        assert scales == [256, 128, 64, 64, 64], "hysteresis, halving, minimum"
        assert engine.skipped_steps == 5
        assert engine.get_lr() == rate, "the schedule waits"
        assert_same(full_parameters(engine.module), before, f"stage {stage}: skipped steps change nothing")
        _train_one(engine, Batch(2, 0, rank))
        assert engine.was_step_applied()
    return records


def test_fp16_overflow_skips_the_step_lowers_the_scale_and_names_the_parameter() -> None:
    names = {name for name, _ in Stack().named_parameters()}
    for records in run_ranks(2, _overflow):
        skipped = [text for text in records if "step skipped" in text]
        assert len(skipped) == 5 * len(ALL)
        for text in skipped:
            assert any(f"first in {name} (" in text for name in names), text
            assert "inf" in text or "NaN" in text


class _Poison(torch.autograd.Function):
    """Identity whose gradient becomes `value` in one place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        poisoned = grads[0].clone()
        poisoned.view(-1)[0] = ctx.value
        return poisoned, None


class _Poisoned(Stack):
    """The gradient of `outer.bias` gets one bad value on demand, that of nothing else."""

    value = 0.0

    def forward(self, x: torch.Tensor, select: tuple[int, ...] | None = None) -> torch.Tensor:
        hidden = super().forward(x, select).detach()
        bias = _Poison.apply(self.outer.bias, self.value) if self.value else self.outer.bias
        return hidden + bias


def _non_finite(rank: int, world: int) -> None:
    for stage in ALL:
        model, optimizer = shard_task(Task(_Poisoned, square_loss), Setting(plan=stage, clip=1.0))
        assert isinstance(model, _Poisoned)
        before = full_parameters(model)
        for value, kind in ((float("nan"), "NaN"), (float("inf"), "inf")):
            model.value = value if rank == world - 1 else 0.0
            square_loss(model, Batch(0, 0, rank)).backward()
            with pytest.raises(NonFiniteError, match=rf"outer\.bias \({kind}\).*not applied"):
                optimizer.step()
            optimizer.zero_grad()
        assert_same(full_parameters(model), before, f"stage {stage}")
        model.value = 0.0
        square_loss(model, Batch(0, 0, rank)).backward()
        optimizer.step()  # and training goes on
        after = full_parameters(model)
        assert not torch.equal(after["outer.bias"], before["outer.bias"])


def test_fp32_non_finite_gradients_raise_naming_the_parameter() -> None:
    run_ranks(2, _non_finite)


def _nan_loss(rank: int, world: int) -> None:
    model, optimizer = shard_task(STACK, Setting())
    before = full_parameters(model)
    (square_loss(model, Batch(0, 0, rank)) * (float("nan") if rank else 1.0)).backward()
    with pytest.raises(NonFiniteError, match=r"first in .*\(NaN\)"):
        optimizer.step()
    assert_same(full_parameters(model), before)


def test_a_nan_loss_on_one_rank_raises_on_all() -> None:
    run_ranks(2, _nan_loss)


def _wire_and_accumulator(rank: int, world: int) -> None:
    """Gradients of 1 + 2**-10 per micro-batch: fp32 keeps the small part, a bf16 wire or accumulator loses it."""
    small = 2.0**-10

    def gradient(precision: Precision, stage: int, micro: int) -> float:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).requires_grad_(False)
        model[1].weight.requires_grad_(True)
        with torch.no_grad():
            model[0].weight.fill_(1.0)
            model[1].weight.fill_(0.0)
        recipe = Recipe(STAGES[stage], precision=precision, policy=ExecutionPolicy(accumulate=micro > 1))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=1.0)
        model, stepper = zeroshard.shard(model, optimizer, plan=recipe)
        assert stepper is not None
        for _ in range(micro):
            model(torch.full((1, 1), 1.0 + small, dtype=next(model.parameters()).dtype)).sum().backward()
        stepper.step()
        return -float(full_parameters(model)["1.weight"])

    for stage in ALL:
        assert gradient(Precision(), stage, 1) == 1 + small
        assert gradient(Precision(wire="bfloat16"), stage, 1) == 1.0
        assert gradient(Precision(), stage, 2) == 2 + 2 * small
        assert gradient(Precision(accumulate="bfloat16"), stage, 2) == 2.0
        assert gradient(Precision(wire="bfloat16"), stage, 2) == 2.0
        assert gradient(Precision(wire="float32", param="bfloat16"), stage, 2) == 2.0, "computed in bf16"


def test_wire_and_accumulator_dtypes_are_obeyed() -> None:
    run_ranks(2, _wire_and_accumulator)


def _config_dtypes(rank: int, world: int) -> None:
    for stage in ALL:
        settings = config(stage, world, 2, bf16={"enabled": True})
        settings["communication_data_type"] = "fp32"
        settings["data_types"] = {"grad_accum_dtype": "bf16"}
        engine = engine_for(build(STACK), settings)
        for _, group in engine.plan.groups():
            assert group.wire == "float32"
            assert group.grad is not None
            assert group.grad.dtype == "bfloat16"
        _train(engine, STACK, rank, 2, micro=2)
        assert engine.was_step_applied()


def test_config_dtypes_reach_the_plan() -> None:
    run_ranks(2, _config_dtypes)


class _Normed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, select: tuple[int, ...] | None = None) -> torch.Tensor:
        return self.norm(super().forward(x, select).float())


def _kept(rank: int, world: int) -> None:
    for stage in ALL:
        model = build(Task(_Normed, square_loss))
        recipe = Recipe(
            STAGES[stage],
            precision=Precision(param="bfloat16", keep_fp32=("norm",)),
            policy=ExecutionPolicy(cast_inputs="bfloat16"),
        )
        model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=recipe)
        assert optimizer is not None
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        assert {name for name, dtype in dtypes.items() if dtype is torch.float32} == {"norm.weight", "norm.bias"}
        for step in range(2):
            square_loss(model, Batch(step, 0, rank)).backward()
            optimizer.step()
        assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes


def test_kept_modules_stay_in_fp32() -> None:
    run_ranks(2, _kept)


def _integers(rank: int, world: int) -> None:
    engine = engine_for(build(TRANSFORMER), config(3, world, bf16={"enabled": True}))
    assert language_loss(engine, Batch(0, 0, rank)).isfinite(), "token numbers are not cast"


def test_integer_inputs_are_not_cast() -> None:
    run_ranks(2, _integers)
