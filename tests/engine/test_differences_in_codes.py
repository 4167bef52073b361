"""Second copies that get what a step has changed, in 4-bit codes (SDP4Bit): exact at first, and never far from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, held_bytes, sent
from tests.support.models import WIDTH, Batch, Task, square_loss
from tests.support.patience import Patience
from tests.support.training import adamw, build
from tests.support.zoo import Stack
from zeroshard.config import load_config
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.core.virtual_streams import Pace, VirtualStreams
from zeroshard.errors import ConfigError, PlanError
from zeroshard.mesh import NESTED, REPLICATE, Mesh
from zeroshard.plan.builder import Precision, Recipe, build_plan
from zeroshard.plan.hops import GradientCodes
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import DIFFERENCE_CODES, GATHER_CODES, STAGES, Blocks
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.plan.traffic import axes_of_operations, step_traffic, traffic_by_axes
from zeroshard.sharding.units import find_units

TASK = Task(Stack, square_loss)
Values = dict[str, torch.Tensor]


def _recipe(mesh: Mesh, **changes: Any) -> Recipe:
    cast = "bf16" if "precision" in changes else None
    row, policy = STAGES[3].nested(mesh), ExecutionPolicy(accumulate=cast is None, prefetch=1, cast_inputs=cast)
    return Recipe(sharding=row, policy=policy, **{"differences": DIFFERENCE_CODES, **changes})


def _largest_distance(model: nn.Module) -> tuple[float, float]:
    """How far what the ranks compute with is from the shards, and how far the shards are from zero."""
    distance = size = 0.0
    for unit in handle_of(model).runtime.units:
        for group in unit.groups:
            if group.second is not None and group.plan.differences is not None:
                first, _ = group.plan.second_range(group.rank)
                start, end = group.plan.layout.shard_range(group.rank)
                had = group.second[start - first : end - first]
                distance = max(distance, float((had - group.shard).abs().max()))
                size = max(size, float(group.shard.abs().max()))
    return distance, size


def _trained(rank: int, mesh: Mesh, recipe: Recipe, pace: Pace | None = None) -> tuple[Values, list[float]]:
    model = build(TASK)
    streams = None if pace is None else VirtualStreams(Patience(), pace=pace, seed=rank)
    model, optimizer = zeroshard.shard(model, adamw(model), plan=recipe, mesh=mesh, streams=streams)
    losses: list[float] = []
    for step in range(4):
        zeroshard.drain(model)
        forget_sent(model)
        for micro in range(2):
            loss = TASK.loss(model, Batch(step, micro, rank))
            losses.append(float(loss.detach()))
            (loss / 2).backward()
        distance, size = _largest_distance(model)
        assert distance <= (0 if step == 0 else 2e-4 * max(size, 1))  # a step changes 1e-3 at most, by AdamW's rate
        optimizer.step()
        optimizer.zero_grad()
    plan = zeroshard.plan_of(model)
    assert sent(model) == step_traffic(plan, micro_batches=2)
    assert held_bytes(model).total == state_bytes(plan).total
    found = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}
    zeroshard.close(model)
    return found, losses


def _near_exact(rank: int, world: int, subgroup: int, changes: dict[str, Any]) -> None:
    mesh = Mesh.data_parallel(world, subgroup)
    expected, exact = _trained(rank, mesh, _recipe(mesh, differences=None, **changes))
    found, losses = _trained(rank, mesh, _recipe(mesh, **changes))
    assert losses[:2] == exact[:2]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=5e-4)
    if not changes:
        again, _ = _trained(rank, mesh, _recipe(mesh), Pace.MIXED)
        assert all(torch.equal(again[name], value) for name, value in found.items())


@pytest.mark.parametrize(
    ("world", "subgroup", "changes"),
    [(4, 2, {}), (6, 2, {"offload": Offload(param=True)})],
    ids=["2 x 2", "3 nodes of 2, on the host"],
)
def test_steps_are_near_those_of_exact_copies(world: int, subgroup: int, changes: dict[str, Any]) -> None:
    run_ranks(world, _near_exact, subgroup, changes)


class Wide(nn.Module):
    """Linears whose parameters need no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 64, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(3)])
        self.outer = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.outer(x)


WIDE = Task(Wide, square_loss)
BF16 = Precision(param="bf16")
WAYS: dict[str, tuple[float, dict[str, Any]]] = {
    "hpZ": (4.0, {"differences": None}),
    "hpZ, qwZ, qgZ": (1.6, {"differences": None, "codes": GATHER_CODES, "gradient_codes": GradientCodes()}),
    "differences, qgZ": (1.1, {"gradient_codes": GradientCodes()}),
}
"""The most bytes that leave a node per parameter and step."""


def _between(plan: Plan, payload: int) -> float:
    """Bytes between nodes per parameter: what all ranks of a node send, each its part."""
    return payload * plan.mesh.size(("dp_shard",)) / plan.parameter_numel


def _planned(plan: Plan) -> float:
    return _between(plan, sum(n for (_, axes), (_, n) in traffic_by_axes(plan).items() if axes == (REPLICATE,)))


def _counted(rank: int, world: int) -> None:
    mesh = Mesh.data_parallel(world, 2)
    for most, changes in WAYS.values():
        model = build(WIDE)
        recipe = _recipe(mesh, precision=BF16, **changes)
        model, optimizer = zeroshard.shard(model, adamw(model), plan=recipe, mesh=mesh)
        for step in range(3):
            zeroshard.drain(model)
            forget_sent(model)
            WIDE.loss(model, Batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        zeroshard.drain(model)
        plan, axes = zeroshard.plan_of(model), axes_of_operations(zeroshard.plan_of(model))
        counts = handle_of(model).comm.sent.counts().items()
        payload = sum(calls * op.nbytes for op, calls in counts if axes.get(tuple(op)) == (REPLICATE,))
        assert _between(plan, payload) == _planned(plan) <= most
        zeroshard.close(model)


def test_bytes_between_nodes_are_counted_on_the_wire_as_in_the_plan() -> None:
    run_ranks(4, _counted)


@pytest.mark.parametrize(("most", "changes"), list(WAYS.values()), ids=list(WAYS))
def test_bytes_between_nodes_on_8_ranks_by_the_plan(most: float, changes: dict[str, Any]) -> None:
    mesh = Mesh.data_parallel(8, 4)
    plan = build_plan(find_units(build(WIDE)), _recipe(mesh, precision=BF16, **changes), mesh)
    assert _planned(plan) <= most


CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}


def _config(**zero: Any) -> dict[str, Any]:
    section = {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": 2, **zero}
    return {**CONFIG, "zero_optimization": section}


def _from_config(rank: int, world: int, folder: str) -> None:
    zero = {"zero_quantized_weight_differences": True, "zero_quantized_gradients": True, "zero_quantized_weights": True}
    engine, *_ = zeroshard.initialize(model=build(TASK), config=_config(zero_quantized_weights_bits=4, **zero))
    for group in (group for _, group in engine.plan.groups()):
        assert (group.codes, group.differences) == (None, DIFFERENCE_CODES)
    for step in range(2):
        engine.backward(TASK.loss(engine, Batch(step, 0, rank)))
        engine.step()
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    with torch.no_grad():
        TASK.loss(engine, Batch(2, 0, rank))
    assert _largest_distance(engine.module)[0] == 0  # after a load copies are made anew
    engine.destroy()
    frozen = build(TASK)
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    frozen.get_parameter("inner.bias").requires_grad_(True)
    nontrainable = {"zero_quantized_nontrainable_weights": True, "zero_quantized_weights_bits": 4}
    engine, *_ = zeroshard.initialize(model=frozen, config=_config(**nontrainable))
    assert {group.codes for _, group in engine.plan.groups()} == {None, Blocks(4, 64)}
    engine.backward(TASK.loss(engine, Batch(0, 0, rank)))
    engine.step()
    loss = float(TASK.loss(engine, Batch(1, 0, rank)))
    engine.save_checkpoint(folder)
    parameter = engine.module.get_parameter("outer.weight")
    with zeroshard.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.zero_()
    assert float(TASK.loss(engine, Batch(1, 0, rank))) != loss
    engine.load_checkpoint(folder)
    assert float(TASK.loss(engine, Batch(1, 0, rank))) == loss  # copies of what is frozen are made anew too
    engine.destroy()


def test_the_config_asks_for_differences_and_for_4_bits(tmp_path: Path) -> None:
    run_ranks(4, _from_config, str(tmp_path))


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"zero_quantized_weight_differences": True, "zero_hpz_partition_size": 1}, "zero_hpz_partition_size"),
        ({"zero_quantized_weights": True, "zero_quantized_weights_bits": 5}, "8 and of 4 bits"),
    ],
)
def test_what_means_nothing_is_refused_by_name(zero: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(_config(**zero), world_size=4)


def test_plans_without_second_copies_have_no_differences() -> None:
    mesh = Mesh.data_parallel(4, 2)
    plan = build_plan(find_units(build(TASK)), _recipe(mesh), mesh)
    assert {unit.axes for unit in plan.units} == {NESTED}
    with pytest.raises(PlanError, match="float64"):
        build_plan(find_units(build(TASK).double()), _recipe(mesh), mesh)
    flat = build_plan(find_units(build(TASK)), _recipe(Mesh.data_parallel(4)), 4)
    assert all(group.differences is None for _, group in flat.groups())
