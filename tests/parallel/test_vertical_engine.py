"""`pipeline.schedule: "vertical"`: train_batch of an engine trains to the bits of the usual order, at every stage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.support.disk import disk_folder
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, sent
from tests.support.models import VOCABULARY, WIDTH, Batch, Block
from tests.support.sequence import cross_entropy
from zeroshard.errors import ConfigError, UsageError
from zeroshard.pipeline.engine import PipelineEngine
from zeroshard.plan.traffic import step_traffic

MICRO = 3
Told = tuple[list[float], dict[str, torch.Tensor], list[float]]
"""Losses, parameters and norms."""


class Masked(nn.Module):
    """A block that hands on a mask beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = inputs
        return self.block(x) * mask, mask


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.1)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.embedding(tokens, self.weight)
        return x, torch.ones_like(x[..., :1])


def _head(module: Embedding, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.linear(inputs[0], module.weight)


def _layers() -> list[Any]:
    tied = zeroshard.TiedLayerSpec
    return [
        tied("embedding", Embedding),
        *[zeroshard.LayerSpec(Masked) for _ in range(3)],
        lambda inputs: (inputs[0] * 2, inputs[1]),
        tied("embedding", Embedding, forward_fn=_head, tied_weight_attr="weight"),
    ]


def _config(stage: int, schedule: str, **others: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **others.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}},
        "pipeline": {"schedule": schedule, **others.pop("pipeline", {})},
        **others,
    }


def _data(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    number = 0
    while True:
        tokens = Batch(number, 0, rank).tokens()
        yield tokens[:, :-1], tokens[:, 1:]
        number += 1


def _engine(config: dict[str, Any], **options: Any) -> PipelineEngine:
    model = zeroshard.PipelineModule(_layers(), num_stages=1, loss_fn=cross_entropy, seed_layers=True, **options)
    engine, *_ = zeroshard.initialize(model=model, config=config)
    assert isinstance(engine, PipelineEngine)
    return engine


def _train(rank: int, config: dict[str, Any], **options: Any) -> Told:
    engine, told, norms, data = _engine(config, **options), list[float](), list[float](), _data(rank)
    for step in range(3):
        told.append(float(engine.train_batch(data)))
        norms.append(engine.get_global_grad_norm() or 0.0)
        if step == 1:
            told.append(float(engine.eval_batch(_data(rank + 100), num_micro_batches=2)))
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (3, 3 * MICRO, 0)
    values = {name: one.clone() for name, one in zeroshard.full_state_dict(engine.module).items()}
    engine.destroy()
    return told, values, norms


def _assert_same(found: Told, wanted: Told, what: str) -> None:
    assert found[0] == wanted[0], what
    # Squares of gradients that go to host memory are added in another order.
    assert found[2] == pytest.approx(wanted[2], rel=1e-12), what
    assert all(torch.equal(one, wanted[1][name]) for name, one in found[1].items()), what


def _bits(rank: int, world: int) -> None:
    # Stage 1 sums the micro-batches before their reduce in the usual order, too.
    wanted = _train(rank, _config(1, "auto"))
    for stage in range(4):
        for interval in (0, 1):
            section = {"activation_checkpoint_interval": interval}
            found = _train(rank, _config(stage, "vertical", pipeline=section))
            _assert_same(found, wanted, f"stage {stage}, interval {interval}")
    for low in ({"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True, "dtype": "bf16"}}):
        other = _train(rank, _config(1, "auto", **low))
        for stage in (1, 3):
            _assert_same(_train(rank, _config(stage, "vertical", **low)), other, f"stage {stage} with {low}")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_stage_gives_the_bits_of_the_usual_order(world: int) -> None:
    run_ranks(world, _bits, timeout=300)


def _offloaded(rank: int, world: int, folder: Path) -> None:
    cpu, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(folder)}
    wanted = _train(rank, _config(1, "auto", zero={"offload_optimizer": cpu}))
    for param, state in ((None, cpu), (cpu, cpu), (disk, cpu), (disk, disk)):
        zero = {"offload_optimizer": state} | ({} if param is None else {"offload_param": param})
        _assert_same(_train(rank, _config(3, "vertical", zero=zero)), wanted, f"{zero}")


def test_state_and_parameters_in_host_memory_and_on_disk_give_them_too(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _offloaded, folder, timeout=300)


def _traffic(rank: int, world: int) -> None:
    sums: list[int] = []
    for schedule in ("auto", "vertical"):
        engine, data = _engine(_config(3, schedule, zero={"stage3_max_reuse_distance": 0})), _data(rank)
        for _ in range(3):
            forget_sent(engine.module)
            engine.train_batch(data)
        measured = sent(engine.module)
        planned = step_traffic(engine.plan, micro_batches=MICRO)
        counted = {kind: measured.calls[kind] for kind in ("all-gather", "reduce-scatter")}
        assert counted == {kind: planned.calls[kind] for kind in counted}, schedule
        sums.append(counted["all-gather"])
        units = sum(bool(unit.groups) for unit in engine.plan.units)
        assert counted["reduce-scatter"] == units * (MICRO if schedule == "auto" else 1)
        engine.destroy()
    assert sums[0] == MICRO * sums[1]


def test_units_are_gathered_once_per_step_and_direction() -> None:
    run_ranks(2, _traffic)


def _float16(rank: int, world: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}
    found: list[tuple[int, Told]] = []
    for stage, schedule in ((1, "auto"), (1, "vertical"), (3, "vertical")):
        engine, data = _engine(_config(stage, schedule, fp16=fp16)), _data(rank)
        losses = [float(engine.train_batch(data)) for _ in range(5)]
        values = zeroshard.full_state_dict(engine.module)
        found.append((engine.skipped_steps, (losses, values, [])))
        engine.destroy()
    assert 0 < found[0][0] < 5
    for skipped, told in found[1:]:
        assert skipped == found[0][0]
        _assert_same(told, found[0][1], "fp16")


def test_steps_in_float16_are_scaled_and_skipped_as_usual() -> None:
    run_ranks(2, _float16)


def _sizes(rank: int, world: int) -> None:
    engine, data = _engine(_config(3, "vertical")), _data(rank)
    plan = engine.plan
    for steps in (3, 5, 1):
        engine.set_gradient_accumulation_steps(steps)
        engine.train_batch(data)
    assert engine.plan.policy == plan.policy, "no accumulators are taken"
    assert engine.micro_steps == 9
    engine.destroy()
    alone = _engine(_config(3, "vertical") | {"gradient_accumulation_steps": 1})
    alone.train_batch(data)
    with pytest.raises(UsageError, match=r"began with one micro-batch per step, so the plan has no sums for 2"):
        alone.set_gradient_accumulation_steps(2)
    alone.destroy()


def test_the_number_of_micro_batches_may_change() -> None:
    run_ranks(1, _sizes)


def _refused(rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match=r"pipeline.schedule 'vertical': a Sequential is called as a whole"):
        zeroshard.initialize(model=nn.Sequential(nn.Linear(2, 2)), config=_config(3, "vertical"))
    two = zeroshard.PipelineModule(_layers(), num_stages=2, loss_fn=cross_entropy)
    with pytest.raises(UsageError, match=r"'vertical' runs one stage, and this PipelineModule has 2; use num_stages=1"):
        zeroshard.initialize(model=two, config=_config(1, "vertical"))
    with pytest.raises(UsageError, match=r"managed_gradient_accumulation false: train_batch\(\)"):
        _engine(_config(1, "vertical", managed_gradient_accumulation=False))


def test_what_cannot_be_run_so_is_refused_by_name() -> None:
    run_ranks(2, _refused)
