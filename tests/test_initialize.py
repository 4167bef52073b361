"""DeepSpeed's face: `initialize` with any kind of config, and the engine's calls."""

from __future__ import annotations

import argparse
import json
import math
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zeroshard
from zeroshard.engine.engine import Engine
from zeroshard.errors import ConfigError, PlanError, UsageError, ZeroShardWarning
from zeroshard.optim.optimizer import ShardedOptimizer

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-6}}
CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW, "gradient_clipping": 0.0}
"""Decay and clipping are off as the plain loops here have them; the defaults are DeepSpeed's: decay 0, clipping 1."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(12, 3)
        self.nickname = "small"

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x) * scale

    def greet(self) -> str:
        return f"hello from {self.nickname}"


def build() -> Model:
    torch.manual_seed(5)
    return Model()


def batch(step: int, micro: int = 0, rank: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + 100 * micro + rank))


def loss_of(model: nn.Module, *where: int) -> torch.Tensor:
    return model(batch(*where)).float().square().mean()


def start(config: Any = None, **arguments: Any) -> tuple[Engine, ShardedOptimizer]:
    """An engine in this process alone."""
    engine, optimizer, _, _ = zeroshard.initialize(model=build(), config=config or CONFIG, **arguments)
    assert optimizer is not None
    return engine, optimizer


def train(engine: Engine, micro_batches: int, first: int = 0) -> None:
    for number in range(first, first + micro_batches):
        engine.backward(loss_of(engine, number))
        engine.step()


def parameters(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in zeroshard.iterate_full_parameters(engine.module)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Where the config comes from.


def test_a_config_is_a_dict_a_path_json_text_or_in_args(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    ways: list[dict[str, Any]] = [
        {"config": CONFIG},
        {"config": file},
        {"config": str(file)},
        {"config": json.dumps(CONFIG)},
        {"config_params": CONFIG},
        {"args": Namespace(deepspeed_config=str(file))},
        {"args": Namespace(deepspeed_config=str(file)), "config": CONFIG},
    ]
    for given in ways:
        engine, optimizer, loader, scheduler = zeroshard.initialize(model=build(), **given)
        assert engine.train_micro_batch_size_per_gpu() == 4
        assert isinstance(optimizer, ShardedOptimizer)
        assert (loader, scheduler) == (None, None)
        engine.destroy()


def test_a_scripts_parser_takes_the_config_as_deepspeeds_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG))
    parser = zeroshard.add_config_arguments(argparse.ArgumentParser())
    engine, *_ = zeroshard.initialize(
        args=parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)]), model=build()
    )
    assert (engine.global_rank, engine.local_rank, engine.world_size) == (0, 0, 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert engine.local_rank == 3
    engine.destroy()


def test_no_config_or_two_are_refused() -> None:
    with pytest.raises(UsageError, match=r"needs a config.*deepspeed_config"):
        zeroshard.initialize(model=build())
    with pytest.raises(UsageError, match="config or config_params"):
        zeroshard.initialize(model=build(), config=CONFIG, config_params=CONFIG)


def test_no_model_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a model"):
        zeroshard.initialize(config=CONFIG)


def test_an_mpu_that_is_no_mesh_is_refused_with_what_is_needed() -> None:
    with pytest.raises(UsageError, match=r"initialize\(mpu=\.\.\.\): a torch DeviceMesh is needed, or two sizes"):
        zeroshard.initialize(model=build(), config=CONFIG, mpu=object())


def test_a_batch_that_does_not_add_up_names_the_numbers() -> None:
    config = {**CONFIG, "train_batch_size": 10, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match=r"train_batch_size.*says 10.*4.*2.*= 8"):
        zeroshard.initialize(model=build(), config=config)


def test_a_model_can_be_sharded_once() -> None:
    engine, _ = start()
    with pytest.raises(UsageError, match="sharded already"):
        zeroshard.initialize(model=engine.module, config=CONFIG)
    engine.destroy()


# Training.


def test_the_engine_trains_as_the_plain_loop_does() -> None:
    engine, _ = start()
    train(engine, 3)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(parameters(engine), dict(model.named_parameters()))
    assert (engine.micro_steps, engine.global_steps, engine.skipped_steps) == (3, 3, 0)
    engine.destroy()


def test_the_optimizer_is_the_clients_or_made_by_its_factory() -> None:
    expected: dict[str, torch.Tensor] = {}
    for make in (
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0),
        lambda _: lambda found: torch.optim.AdamW(found, lr=1e-2, eps=1e-6, weight_decay=0),
    ):
        model = build()
        config = {"train_micro_batch_size_per_gpu": 4}
        engine, optimizer, _, _ = zeroshard.initialize(model=model, optimizer=make(model), config=config)
        assert isinstance(optimizer, torch.optim.Optimizer)
        train(engine, 2)
        expected = expected or parameters(engine)
        assert same(parameters(engine), expected)
        engine.destroy()


def test_parameter_groups_keep_their_own_settings() -> None:
    model = build()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 5e-3},
    ]
    engine, optimizer, _, _ = zeroshard.initialize(model=model, model_parameters=groups, config=CONFIG)
    assert optimizer is not None
    assert engine.get_lr() == [1e-2, 5e-3]
    train(engine, 2)
    other = build()
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in other.parameters() if p.ndim > 1], "weight_decay": 0.3},
            {"params": [p for p in other.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 5e-3},
        ],
        lr=1e-2,
        eps=1e-6,
    )
    for step in range(2):
        loss_of(other, step).backward()
        plain.step()
        plain.zero_grad()
    assert same(parameters(engine), dict(other.named_parameters()))
    engine.destroy()


def test_parameters_left_out_are_not_trained() -> None:
    model = build()
    before = {name: value.clone() for name, value in model.named_parameters()}
    engine, *_ = zeroshard.initialize(model=model, model_parameters=model.blocks.parameters(), config=CONFIG)
    train(engine, 1)
    after = parameters(engine)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.startswith("blocks")
    }
    engine.destroy()


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="not the model's"):
        zeroshard.initialize(
            model=build(), optimizer=torch.optim.AdamW(build().parameters()), config={"train_batch_size": 4}
        )


def test_several_micro_batches_make_one_step_of_their_mean() -> None:
    engine, _ = start({**CONFIG, "gradient_accumulation_steps": 3})
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (12, 3)
    seen = []
    for micro in range(6):
        before = parameters(engine)
        loss = loss_of(engine, micro)
        returned = engine.backward(loss)
        assert torch.equal(returned, loss / 3)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        seen.append((boundary, not same(before, parameters(engine)), engine.global_steps))
    before_boundaries = [(False, False, 0), (False, False, 0), (True, True, 1)]
    assert seen == [*before_boundaries, (False, False, 1), (False, False, 1), (True, True, 2)]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0)
    for micro in range(6):
        (loss_of(model, micro) / 3).backward()
        if micro % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(model.named_parameters())
    assert (
        max(float((value - expected[name]).detach().abs().max()) for name, value in parameters(engine).items()) < 1e-6
    )
    engine.destroy()


def test_the_loss_is_left_alone_on_request() -> None:
    engine, _ = start({**CONFIG, "gradient_accumulation_steps": 2})
    loss = loss_of(engine, 0)
    assert engine.backward(loss, scale_wrt_gas=False) is loss
    engine.destroy()


def test_the_boundary_can_be_set_by_hand() -> None:
    engine, _ = start({**CONFIG, "gradient_accumulation_steps": 2})
    steps = []
    for micro, boundary in enumerate((False, False, True, True, False)):
        engine.set_gradient_accumulation_boundary(boundary)
        train(engine, 1, micro)
        steps.append(engine.global_steps)
    assert steps == [0, 0, 1, 2, 2]
    engine.set_gradient_accumulation_boundary(None)  # counted again: one micro-batch of two has been
    train(engine, 1, 5)
    assert engine.global_steps == 3
    with pytest.raises(UsageError, match="True, False, or None"):
        engine.set_gradient_accumulation_boundary("no")  # type: ignore[arg-type]
    engine.destroy()


def test_a_step_amid_an_accumulation_is_none_that_was_applied() -> None:
    """As under DeepSpeed 0.19.8 on the CPU, stages 0 to 3: False, True, False, True, and while a flag says when."""
    engine, _ = start({**CONFIG, "gradient_accumulation_steps": 2})
    applied = []
    for number, boundary in enumerate([None, None, None, None, True, False, None]):
        engine.set_gradient_accumulation_boundary(boundary)
        train(engine, 1, number)
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, True, True, False, True]
    engine.destroy()


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    engine, _ = start()
    with pytest.raises(UsageError, match=r"scalar loss, got a tensor of shape \(4, 3\)"):
        engine.backward(engine(batch(0)))
    with pytest.raises(UsageError, match="scalar loss, got float"):
        engine.backward(1.5)  # type: ignore[arg-type]
    engine.destroy()


# What the engine tells.


def test_the_engine_tells_norm_rate_and_whether_the_step_was_applied() -> None:
    engine, _ = start({**CONFIG, "gradient_clipping": 1e-3})
    assert engine.get_global_grad_norm() is None
    assert not engine.was_step_applied()
    model = build()
    loss_of(model, 0).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    train(engine, 1)
    assert engine.get_global_grad_norm() == pytest.approx(float(expected), rel=1e-5)
    assert engine.was_step_applied()
    assert (engine.get_lr(), engine.loss_scale) == ([1e-2], 1.0)
    engine.destroy()


def test_train_and_eval_reach_the_model_and_other_names_fall_through() -> None:
    engine, _ = start()
    model = engine.module
    assert engine.eval() is engine
    assert not model.training
    engine.train()
    assert model.training
    assert engine.greet() == "hello from small"
    assert engine.nickname == "small"
    assert torch.equal(engine(batch(0), scale=2.0), model(batch(0), scale=2.0))
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing
    with torch.no_grad():
        assert not engine(batch(0)).requires_grad
    engine.destroy()


def test_without_an_optimizer_it_warns_at_once_and_refuses_to_train() -> None:
    with pytest.warns(ZeroShardWarning, match="forward only") as caught:
        engine, optimizer, _, _ = zeroshard.initialize(model=build(), config={"train_batch_size": 4})
    assert caught[0].filename == __file__
    assert optimizer is None
    loss = loss_of(engine, 0)
    for call in (lambda: engine.backward(loss), engine.step, engine.get_lr, engine.zero_grad):
        with pytest.raises(UsageError, match=r"no optimizer; name one in the config"):
            call()
    engine.destroy()


def test_a_schedule_without_an_optimizer_is_refused() -> None:
    config = {"train_batch_size": 4, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroShardWarning)
        with pytest.raises(ConfigError, match="scheduler"):
            zeroshard.initialize(model=build(), config=config)


def test_training_data_comes_back_as_batches() -> None:
    data = TensorDataset(torch.arange(10.0))
    _, _, loader, _ = zeroshard.initialize(model=build(), config=CONFIG, training_data=data)
    assert loader is not None
    assert [len(rows) for (rows,) in loader] == [4, 4, 2]


# Schedules.


def test_the_configs_schedule_steps_with_the_updates() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.4, "warmup_num_steps": 4}}
    config = {**CONFIG, "gradient_accumulation_steps": 2, "scheduler": scheduler}
    engine, _, _, found = zeroshard.initialize(model=build(), config=config)
    assert found is engine.lr_scheduler
    assert found is not None
    rates = []
    for micro in range(6):
        train(engine, 1, micro)
        rates.append(engine.get_lr()[0])
    # The rate after update n is log(n) / log(4) of the maximum; between updates it stays.
    assert rates == pytest.approx([0.0, 0.0, 0.0, 0.2, 0.2, 0.4 * math.log(3) / math.log(4)])
    engine.destroy()


def test_a_config_may_name_a_schedule_of_torch_and_its_end_is_told() -> None:
    schedule = {"type": "OneCycleLR", "params": {"max_lr": 0.4, "total_steps": 2, "cycle_momentum": False}}
    engine, _ = start({**CONFIG, "scheduler": schedule})
    train(engine, 1)
    assert engine.get_lr() == pytest.approx([0.4 / 25 / 1e4])
    train(engine, 1, 1)
    with pytest.raises(UsageError, match="the update was made, but OneCycleLR takes no further step"):
        train(engine, 1, 2)
    engine.destroy()


def test_the_clients_schedule_reaches_the_sharded_optimizer_and_torch_does_not_complain() -> None:
    for as_factory in (False, True):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)

        def halve(found: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.StepLR(found, 1, gamma=0.5)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine, sharded, _, scheduler = zeroshard.initialize(
                model=model,
                optimizer=optimizer,
                lr_scheduler=halve if as_factory else halve(optimizer),
                config={"train_micro_batch_size_per_gpu": 4},
            )
            assert sharded is not None
            rates = []
            for step in range(3):
                rates += engine.get_lr()
                train(engine, 1, step)
        assert rates == [1.0, 0.5, 0.25]
        assert scheduler.get_last_lr() == [0.125] == [group["lr"] for group in sharded.param_groups]
        engine.destroy()


def test_a_schedule_by_a_metric_gets_it_from_the_step_and_nothing_is_updated_without() -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    engine, _ = start(lr_scheduler=plateau)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.get_lr() == pytest.approx([1e-4])
    before = parameters(engine)
    engine.backward(loss_of(engine, 3))
    with pytest.raises(UsageError, match=r"ReduceLROnPlateau: missing a required argument: 'metrics'.*lr_kwargs"):
        engine.step()
    assert (same(before, parameters(engine)), engine.global_steps, engine.micro_steps) == (True, 3, 3)
    engine.step({"metrics": 0.5})
    assert engine.global_steps == 4
    engine.destroy()


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (3, "lr_scheduler is a int"),
        (lambda optimizer: None, "lr_scheduler is a NoneType"),
        (torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1), "StepLR over another"),
    ],
)
def test_what_would_set_no_rate_is_no_schedule(scheduler: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        start(lr_scheduler=scheduler)


def test_a_skipped_step_moves_neither_parameters_nor_schedule() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine, _, _, _ = zeroshard.initialize(model=build(), config={**CONFIG, "scheduler": scheduler, "fp16": fp16})
    train(engine, 1)
    before, rate, scale = parameters(engine), engine.get_lr(), engine.loss_scale
    assert scale == 256.0
    engine.backward(loss_of(engine, 1) * float("inf"))
    engine.step()
    assert not engine.was_step_applied()
    assert (engine.skipped_steps, engine.global_steps, engine.get_lr()) == (1, 2, rate)
    assert same(before, parameters(engine))
    assert engine.loss_scale == 128.0
    train(engine, 1, 2)
    assert engine.was_step_applied()
    assert engine.get_lr() != rate
    engine.destroy()


def test_hyper_parameters_that_together_are_too_large_are_one_error() -> None:
    engine, _ = start({**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 2e38}}})
    engine.backward(loss_of(engine, 0))
    with pytest.raises(UsageError, match="hyper-parameter, or a product of some, is too large"):
        engine.step()


def test_a_module_kept_in_float32_whose_model_does_not_cast_is_explained() -> None:
    kept = {"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": ["out"]}}
    engine, _ = start({**CONFIG, **kept})
    with pytest.raises(RuntimeError, match=r"same dtype(.|\n)*keep_in_fp32_modules(.|\n)*has to cast"):
        loss_of(engine, 0)
