"""Moments in 8 and 4 bits: sharded they are those of the same rule over whole parameters, bit for bit.

As in test_own_optimizers only two batches have a gradient that is not zero, so that nothing depends on an order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.beside import needs_torchao, use_beside
from tests.support.cases import ALL_CASES, only_with_all_cases
from tests.support.distributed import run_ranks
from tests.support.measure import held_bytes
from tests.support.models import Batch, Task
from tests.support.references import PlainLowBit
from tests.support.training import (
    Setting,
    assert_close,
    assert_same,
    build,
    full_parameters,
    shared_reference,
    train_sharded,
)
from zeroshard.config import load_config
from zeroshard.config.optimizers import LOW_BIT, ONE_BIT, OPTIMIZERS
from zeroshard.engine.engine import Engine
from zeroshard.engine.planning import make_plan
from zeroshard.errors import CheckpointError, PlanError
from zeroshard.optim.adam.blocks import require_torchao
from zeroshard.optim.configured import configured_source
from zeroshard.plan.builder import Recipe
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.placement import STAGES, Blocks
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import HostUpdate
from zeroshard.planner.choose.configs import read_config
from zeroshard.planner.machine.hardware import parse_cluster
from zeroshard.sharding.units import find_units

WIDTH = 64
KINDS = {"Adam8bit": (8, 256, False), "AdamW8bit": (8, 256, True), "Adam4bit": (4, 128, False)}
KINDS["AdamW4bit"] = (4, 128, True)
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


class _Block(nn.Module):
    """4096 elements; 33 blocks of 256, which no number of ranks divides; no whole blocks; few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 132), nn.Linear(132, WIDTH)
        self.odd = nn.Parameter(torch.randn(WIDTH, 65) * 0.1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x + self.even(x) + (x @ self.odd)[:, :WIDTH]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 7)
        self.blocks[1].even.requires_grad_(False)

    def forward(self, x: torch.Tensor, last: bool = True) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](x)) if last else self.blocks[0](x))


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Ranks from 2 on have gradients that are zero; block 1 has none in step 1."""
    return model(batch.normal(3, WIDTH), batch.step != 1).float().square().mean() * (1.0 if batch.rank < 2 else 0.0)


TASK = Task(_Model, _loss)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if "up" not in name]},
        {"params": [p for name, p in named if "up" in name], "lr": 5e-3, "weight_decay": 0.0},
    ]


def _ours(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: getattr(zeroshard, name)(_groups(model), **HYPER)


def _plain(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    bits, block, decoupled = KINDS[name]
    zeros = require_torchao(bits, name).zeros
    return lambda model: PlainLowBit(_groups(model), zeros=zeros, block=block, decoupled=decoupled, **HYPER)


def _equal(rank: int, world: int, cases: tuple[tuple[str, int], ...]) -> None:
    use_beside()
    references: dict[str, Any] = {}
    for name, stage in cases:
        if name not in references:
            references[name] = shared_reference(TASK, Setting(optimizer=_plain(name)), world)
        outcome = train_sharded(TASK, Setting(optimizer=_ours(name), plan=stage), rank)
        assert_same(outcome.parameters, references[name].parameters, f"{name}, stage {stage}, {world} ranks")


MATRIX = {
    1: (("AdamW8bit", 3), ("AdamW4bit", 0)),
    2: tuple((name, stage) for name in KINDS for stage in (range(4) if name.startswith("AdamW") else (3,))),
    3: (("AdamW8bit", 1), ("AdamW8bit", 3), ("AdamW4bit", 3)),
    4: (("AdamW8bit", 2), ("AdamW4bit", 3)),
}


@needs_torchao
@only_with_all_cases
@pytest.mark.parametrize("world", [1, 3, 4])
def test_each_equals_the_same_rule_over_whole_parameters_bit_for_bit(world: int) -> None:
    run_ranks(world, _equal, MATRIX[world])


def _two_ranks(rank: int, world: int, folder: str) -> None:
    """What needs two ranks, in one start of processes: torchao is slow to import."""
    use_beside()
    _equal(rank, world, MATRIX[2] if ALL_CASES else (("AdamW8bit", 0), ("AdamW4bit", 2), ("Adam8bit", 3)))
    _plan_is_held(rank)
    _taken_from_torchao(rank)
    _accumulated_and_clipped(rank, world)
    _resumes(rank, folder)
    _read_and_set(rank)
    _mismatches_are_refused()


def _plan_is_held(rank: int) -> None:
    for name, (bits, block, _) in KINDS.items():
        for stage in (0, 3):
            model = build(TASK)
            _, optimizer = zeroshard.shard(model, _ours(name)(model), plan=stage)
            plan = zeroshard.plan_of(model)
            assert Plan.from_json(plan.to_json()) == plan
            blocked = [group for _, group in plan.groups() if group.moments is not None and group.moments.blocks]
            names = {segment.name for group in blocked for segment in group.layout.segments}
            odd = {"blocks.0.odd", "blocks.1.odd"}
            assert names == {n for n, p in _Model().named_parameters() if p.numel() >= 4096} - odd - {
                "blocks.1.even.weight"
            }
            for group in blocked:  # 2 moments: a code for each element, a scale for each block
                assert group.moments is not None
                assert group.moments.nbytes(block * 12) == 2 * (block * 12 * bits // 8 + 12 * 4)
            _loss(model, Batch(0, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert held_bytes(model) == replace(state_bytes(plan), no_sync=0), (name, stage)
            if rank == 0:
                _check_planner(name, {}, stage)
            zeroshard.close(model)


def _taken_from_torchao(rank: int) -> None:
    """torchao's own optimizer as the client's: its blocks and its decay, and nearly what it computes itself."""
    optim = import_module("torchao.optim")
    for name in ("AdamW8bit", "Adam4bit"):
        setting = Setting(optimizer=partial(_theirs, getattr(optim, name)), steps=3)
        taken = train_sharded(TASK, setting, rank).parameters
        ours = train_sharded(TASK, replace(setting, optimizer=_ours(name)), rank).parameters
        assert_close(taken, ours, 1e-6, name)  # its rates are rounded to float32
        with torch.compiler.set_stance("force_eager"):
            reference = shared_reference(TASK, setting, 2).parameters
        # Where a moment lies between two codes, the last bit of it decides; a step moves by about the rate at most.
        assert_close(taken, reference, 2e-3, name)
        assert float(torch.cat([(taken[key] - reference[key]).abs().flatten() for key in taken]).median()) < 1e-6


def _theirs(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    return kind(_groups(model), **HYPER)


def _accumulated_and_clipped(rank: int, world: int) -> None:
    setting = Setting(steps=3, micro=2, clip=0.5)
    task = Task(_Model, lambda model, batch: _loss(model, batch) * (1.0 if batch.rank == batch.micro else 0.0))
    reference = shared_reference(task, replace(setting, optimizer=_plain("AdamW8bit")), world)
    outcome = train_sharded(task, replace(setting, optimizer=_ours("AdamW8bit"), plan=3), rank)
    assert_same(outcome.parameters, reference.parameters, "accumulated and clipped")


def _engine(name: str, stage: int, **params: Any) -> Engine:
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": name, "params": {"lr": 1e-2, **params}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zeroshard.initialize(model=build(TASK), config=config)[0]


def _trained(engine: Engine, steps: range, rank: int) -> dict[str, torch.Tensor]:
    for step in steps:
        engine.backward(engine(Batch(2 * step, 0, rank).normal(3, WIDTH).bfloat16()).float().square().mean())
        engine.step()
    return {**full_parameters(engine.module), **_moments(engine.module)}


def _moments(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = zeroshard.safe_get_full_optimizer_state(parameter, key)
            if value is not None:
                found[f"{name}.{key}"] = value
    return found


def _resumes(rank: int, folder: str) -> None:
    """Saved at stage 3 and loaded at stages 3 and 1, it goes on with the same bits in parameters and moments."""
    for name in ("adamw8bit", "AdamW4bit"):
        engine = _engine(name, 3)
        _trained(engine, range(2), rank)
        engine.save_checkpoint(folder, tag=name)
        middle, end = _moments(engine.module), _trained(engine, range(2, 4), rank)
        engine.destroy()
        for stage in (3, 1):
            resumed = _engine(name, stage)
            resumed.load_checkpoint(folder, tag=name)
            assert_same(_moments(resumed.module), middle, f"{name} loaded at stage {stage}")
            assert_same(_trained(resumed, range(2, 4), rank), end, f"{name} at stage {stage}")
            resumed.destroy()
    other = _engine("AdamW8bit", 3, block_size=128)
    with pytest.raises(CheckpointError, match=r"exp_avg_scale' has shape \[33\], this run needs \[66\]"):
        other.load_checkpoint(folder, tag="adamw8bit")
    other.destroy()


def _read_and_set(rank: int) -> None:
    """`safe_*` reads moments as numbers, and what it sets is what a block can hold: its own values exactly."""
    model = build(TASK)
    _, optimizer = zeroshard.shard(model, _ours("AdamW8bit")(model), plan=3)
    _loss(model, Batch(0, 0, rank)).backward()
    optimizer.step()
    weight = model.get_submodule("blocks.0.up").weight
    value = torch.linspace(0, 1, weight_numel := 132 * WIDTH).view(132, WIDTH)
    zeroshard.safe_set_full_optimizer_state(weight, value, "exp_avg_sq")
    found = zeroshard.safe_get_full_optimizer_state(weight, "exp_avg_sq")
    assert found is not None
    assert found.shape == (132, WIDTH)
    assert 0 < float((found - value).abs().max()) < 0.01  # 256 codes, finest near 0
    local = zeroshard.safe_get_local_optimizer_state(weight, "exp_avg_sq")
    assert local is not None
    assert 0 < local.numel() < weight_numel
    zeroshard.safe_set_local_optimizer_state(weight, local * 0, "exp_avg_sq")
    assert not zeroshard.safe_get_full_optimizer_state(weight, "exp_avg_sq").any()  # type: ignore[union-attr]
    with pytest.raises(zeroshard.errors.UsageError, match="no state 'exp_avg_codes'; it has exp_avg, exp_avg_sq"):
        zeroshard.safe_get_full_optimizer_state(weight, "exp_avg_codes")
    zeroshard.close(model)


def _mismatches_are_refused() -> None:
    """A plan and an optimizer that keep moments in different forms; options that have no meaning here."""
    optim = import_module("torchao.optim")
    blocked = Recipe(STAGES[3], blocks=Blocks(8, 256))
    for make, plan, match in (
        (_ours("AdamW8bit"), _made(Recipe(STAGES[3])), "in float32, but AdamW8bit has them in 8 bits"),
        (_ours("AdamW4bit"), _made(blocked), "but AdamW4bit has"),
        (lambda m: torch.optim.AdamW(m.parameters()), _made(blocked), "in 8 bits, but AdamW has them in float32"),
        (lambda m: optim.AdamWFp8(m.parameters()), 3, "AdamWFp8 of torchao has no sharded form"),
        (lambda m: optim.AdamW8bit(m.parameters(), bf16_stochastic_round=True), 3, "stochastic rounding"),
        (lambda m: optim.AdamW8bit(m.parameters(), amsgrad=True), 3, "does not support amsgrad"),
        (lambda m: zeroshard.AdamW4bit(m.parameters(), block_size=3), 3, "block_size 3: an even number"),
        (lambda m: zeroshard.AdamW8bit(m.parameters(), lr=-1.0), 3, "lr -1.0 must not be negative"),
    ):
        model = build(TASK)
        with pytest.raises(PlanError, match=match):
            zeroshard.shard(model, make(model), plan=plan)
        zeroshard.close(model)
    processor = zeroshard.Offload(update=HostUpdate.PROCESSOR)
    with pytest.raises(PlanError, match="the processor has no kernel for moments in 8 or 4 bits"):
        zeroshard.shard(model := build(TASK), _ours("AdamW8bit")(model), plan=replace(blocked, offload=processor))


def _made(recipe: Recipe) -> Plan:
    return zeroshard.build_plan(find_units(_Model()), recipe, 2)


@needs_torchao
def test_bytes_clients_resumption_access_and_refusals_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(2, _two_ranks, str(tmp_path), timeout=240.0)


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torchao.optim.subclass_8bit", "torchao.optim.subclass_4bit"):
        monkeypatch.setitem(sys.modules, module, None)
    model = _Model()
    with pytest.raises(PlanError, match=r"AdamW8bit keeps its moments in 8 bits with torchao.*pip install torchao"):
        zeroshard.shard(model, zeroshard.AdamW8bit(model.parameters()))
    config = load_config({"train_batch_size": 1, "optimizer": {"type": "adamw4BIT"}}, world_size=1)
    assert config.optimizer is not None
    assert (config.optimizer.type, config.optimizer.params["block_size"]) == ("AdamW4bit", 128)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind not in ("Muon", *LOW_BIT)])
def test_the_planner_counts_the_state_of_every_optimizer_as_the_engine_does(kind: str) -> None:
    _check_planner(kind, {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}, 0 if kind in ONE_BIT else 2)


def _check_planner(kind: str, params: dict[str, Any], stage: int) -> None:
    document = {
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 1,
    }
    config = load_config(document, world_size=1)
    assert config.optimizer is not None
    model = _Model()
    source = configured_source(config.optimizer.type, config.optimizer.params, list(model.parameters()), {})
    recipe = read_config(document, parse_cluster("1xH100")).recipe
    engine = make_plan(model, replace(recipe, moments=9, blocks=None), source, torch.device("cpu"))
    plan = zeroshard.build_plan(find_units(model), recipe, engine.dp)
    assert state_bytes(plan).moments == state_bytes(engine).moments
    assert state_bytes(plan).moments > 0


def test_no_block_straddles_parameters_or_ranks_and_the_planner_counts_as_the_engine_does() -> None:
    document = {"optimizer": {"type": "AdamW4bit", "params": {}}, "train_micro_batch_size_per_gpu": 1}
    recipe = read_config(document, parse_cluster("8xH100")).recipe
    assert recipe.blocks == Blocks(4, 128)
    plan = zeroshard.build_plan(find_units(_Model()), recipe, 3)
    for _, group in plan.groups():
        if group.moments is not None and group.moments.blocks is not None:
            borders = [border for segment in group.layout.segments for border in (segment.offset, segment.end)]
            assert not any(border % 128 for border in (*borders, group.layout.shard_numel))
    assert 'size": 128' in plan.to_json()
    with pytest.raises(PlanError, match=r"blocks.size 126 does not divide where parameters and shards begin"):
        Plan.from_json(plan.to_json().replace('size": 128', 'size": 126'))
    with pytest.raises(PlanError, match="8 and 4 bits"):
        Blocks(2, 256)
    assert not Blocks(8, 256).suit(2048)
