"""A plan that no config can express trains through the same engine: its units are placed each in its own way.

world 4, subgroups of 2:   root and block 0 whole | block 1 over all ranks | block 2 within a subgroup | block 3 as
                           stage 2 | block 4 as stage 1, within a subgroup
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, held_bytes, sent
from zeroshard.errors import UsageError
from zeroshard.mesh import Mesh
from zeroshard.plan.builder import Precision, Recipe, build_plan
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.placement import STAGES, Sharding
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.plan.traffic import step_traffic
from zeroshard.sharding.units import find_units

WHOLE, ALL_RANKS = STAGES[0], STAGES[3]
SUBGROUP = Sharding(param=True, grad=True, state=True, axes=("dp_shard",))
SUBGROUP_STATE = Sharding(param=False, grad=False, state=True, axes=("dp_shard",))
ROWS = {
    "": WHOLE,
    "blocks.0": WHOLE,
    "blocks.1": ALL_RANKS,
    "blocks.2": SUBGROUP,
    "blocks.3": STAGES[2],
    "blocks.4": SUBGROUP_STATE,
}
CLIP, STEPS = 0.05, 4


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.lin = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.lin(self.norm(x)))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(_Block() for _ in range(5))
        self.out = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def _loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return model(torch.randn(4, 6, generator=generator)).float().square().mean()


def _fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = _Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def _reference(world_size: int, micro_batches: int) -> dict[str, torch.Tensor]:
    """One process that sees the batches of all ranks."""
    model, optimizer = _fresh()
    for step in range(STEPS):
        for rank in range(world_size):
            for micro in range(micro_batches):
                (_loss(model, step, micro, rank) / (micro_batches * world_size)).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
        for gradient in gradients:
            gradient.mul_(min(1.0, CLIP / (math.sqrt(squares) + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _train(plan: Plan, rank: int, micro_batches: int) -> tuple[dict[str, torch.Tensor], nn.Module]:
    model, optimizer = _fresh()
    model, sharded = zeroshard.shard(model, optimizer, plan=plan)
    assert sharded is not None
    for step in range(STEPS):
        for micro in range(micro_batches):
            (_loss(model, step, micro, rank) / micro_batches).backward()
        sharded.step()
        sharded.zero_grad()
    return {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}, model


def _plan(shard_size: int, rows: dict[str, Sharding], *, accumulate: bool, low: bool = False) -> Plan:
    policy = ExecutionPolicy(accumulate=accumulate, clip_norm=CLIP, cast_inputs="bfloat16" if low else None)
    recipe = Recipe(overrides=rows, precision=Precision("bfloat16" if low else None), policy=policy)
    return build_plan(find_units(_Model()), recipe, Mesh.data_parallel(dist.get_world_size(), shard_size))


def _mixed(rank: int, world_size: int, shard_size: int) -> float:
    worst = 0.0
    for micro_batches in (1, 2):
        plan = _plan(shard_size, ROWS, accumulate=micro_batches > 1)
        values, model = _train(Plan.from_json(plan.to_json()), rank, micro_batches)
        zeroshard.close(model)
        expected = _reference(world_size, micro_batches)
        assert values.keys() == expected.keys()
        worst = max(worst, *(float((values[name] - expected[name]).abs().max()) for name in expected))
    return worst


@pytest.mark.parametrize(("world_size", "shard_size"), [(4, 2), (2, 1), (2, 2), (3, 1)])
def test_a_mixed_plan_trains_as_one_process_does(world_size: int, shard_size: int) -> None:
    assert max(run_ranks(world_size, _mixed, shard_size)) < 1e-6


def _placed_in_turn(rank: int, world_size: int) -> list[str]:
    """Names of the plans under which the parameters differ from those of plain stage 3, bit for bit."""
    different: list[str] = []
    for low in (False, True):
        expected: dict[str, torch.Tensor] = {}
        everywhere = {"all ranks": dict.fromkeys(ROWS, ALL_RANKS), "mixed": ROWS, "whole": dict.fromkeys(ROWS, WHOLE)}
        for name, rows in everywhere.items():
            values, model = _train(_plan(world_size, rows, accumulate=False, low=low), rank, 1)
            zeroshard.close(model)
            expected = expected or values
            different += [name] if any(not torch.equal(values[key], expected[key]) for key in expected) else []
    return different


def test_where_the_subgroup_is_everybody_any_mix_gives_the_same_bits() -> None:
    assert run_ranks(2, _placed_in_turn) == [[], []]


def _measured(rank: int, world_size: int) -> None:
    plan = _plan(2, ROWS, accumulate=False, low=True)
    model, optimizer = _fresh()
    model, sharded = zeroshard.shard(model, optimizer, plan=plan)
    assert sharded is not None
    for step in range(3):
        forget_sent(model)
        _loss(model, step, 0, rank).backward()
        sharded.step()
        sharded.zero_grad()
    assert sent(model) == step_traffic(zeroshard.plan_of(model))
    planned = state_bytes(zeroshard.plan_of(model))
    assert held_bytes(model).total == planned.total
    whole = sum(group.layout.numel * 2 for unit, group in plan.groups() if not unit.sharded)
    mesh = plan.mesh
    parts = sum(group.layout.numel * 2 // mesh.size(unit.axes) for unit, group in plan.groups() if unit.sharded)
    assert planned.param == whole + parts
    zeroshard.close(model)


def test_bytes_and_traffic_of_a_mixed_plan_are_those_that_it_says() -> None:
    run_ranks(4, _measured)


def _closed(rank: int, world_size: int) -> None:
    for low in (False, True):
        plan = _plan(2, {**ROWS, "blocks.1": WHOLE}, accumulate=False, low=low)
        expected, model = _train(plan, rank, 1)
        zeroshard.close(model)
        with pytest.raises(UsageError, match=r"'blocks.2.norm.weight' is sharded and empty here"):
            model.state_dict()
        with pytest.raises(UsageError, match=r"forward of 'blocks.2.norm'.*its parameter 'weight' is sharded"):
            model(torch.zeros(1, 6, dtype=next(model.parameters()).dtype))
        with zeroshard.GatheredParameters(model):
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, expected[name].to(parameter.dtype)), name
        model, _ = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), plan=plan)
        values = dict(zeroshard.iterate_full_parameters(model))
        assert all(torch.equal(values[name], expected[name]) for name in expected if name.startswith("blocks.2")), low
        zeroshard.close(model)


def test_a_closed_model_keeps_what_subgroups_had() -> None:
    run_ranks(4, _closed)


def test_engine_and_plan_know_no_config() -> None:
    code = """
import sys
def loaded(*names):
    return [m for m in sys.modules if m.startswith("zeroshard.") and m.split(".")[1] in names]
import zeroshard.plan.report, zeroshard.plan.builder, zeroshard.sharding.units
assert not loaded("config", "engine", "comm", "optim", "checkpoint", "from_config"), loaded
import zeroshard.engine.engine, zeroshard.engine.native, zeroshard.engine.saving.checkpoints
assert loaded("engine")
assert not loaded("config", "from_config"), loaded("config", "from_config")
assert "pydantic" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
