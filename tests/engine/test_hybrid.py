"""Hybrid sharding: subgroups that each hold a copy of the state, named by a torch DeviceMesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.measure import held_bytes
from zeroshard.engine.core.handle import handle_of
from zeroshard.errors import PlanError, UsageError
from zeroshard.mesh import DATA, SHARD, Mesh
from zeroshard.plan.memory import state_bytes

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
Made = tuple[nn.Module, Callable[[torch.Tensor], None]]
"""A sharded model, and what does a step from a loss."""


def _model() -> nn.Module:
    """Whole numbers throughout, so that sums are exact in whichever order they are made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    return model


def _by_shard(stage: int, options: dict[str, Any]) -> Made:
    model = _model()
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.25), plan=stage, **options)

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _by_initialize(stage: int, options: dict[str, Any]) -> Made:
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "stage": stage}}
    engine, *_ = zeroshard.initialize(model=_model(), config=config, **options)

    def step(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return engine.module, step


def _trained(rank: int, made: Made) -> dict[str, torch.Tensor]:
    model, step = made
    for number in range(2):
        inputs = torch.randint(-2, 3, (2, 4), generator=torch.Generator().manual_seed(10 * number + rank)).float()
        step(model(inputs).sum())
    assert held_bytes(model).total == state_bytes(zeroshard.plan_of(model)).total
    values = {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}
    zeroshard.close(model)
    return values


def _hybrid(rank: int, world: int, stage: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=DATA)
    expected = _trained(rank, _by_shard(stage, {}))
    for made in (
        lambda: _by_shard(stage, {"mesh": mesh}),
        lambda: _by_shard(stage, {"shard_size": world // 2}),
        lambda: _by_initialize(stage, {"mesh_param": mesh}),
        lambda: _by_initialize(stage, {"mpu": mesh}),
    ):
        model, step = made()
        handle = handle_of(model)
        assert handle.plan.mesh == Mesh.data_parallel(world, world // 2)
        assert all(unit.axes == ((SHARD,) if stage else unit.axes) for unit in handle.plan.units)
        found = _trained(rank, (model, step))
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("stage", range(4))
def test_two_axes_train_as_one_does_bit_for_bit(stage: int) -> None:
    run_ranks(4, _hybrid, stage)


def _beside_an_axis_of_one_rank(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", *DATA))
    expected = _trained(rank, _by_shard(3, {}))
    found = _trained(rank, _by_shard(3, {"mesh": mesh}))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_axis_of_one_rank_changes_nothing() -> None:
    run_ranks(4, _beside_an_axis_of_one_rank)


def _refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=(SHARD, "tp"))
    with pytest.raises(PlanError, match=r"axis 'tp' has 2 ranks, but nothing uses it: no parameter of the model"):
        _by_shard(3, {"mesh": mesh})
    experts = init_device_mesh("cpu", (1, 2), mesh_dim_names=(SHARD, "ep"))
    with pytest.raises(PlanError, match=r"axis 'ep' has 2 ranks, but nothing uses it: .* has no experts"):
        _by_initialize(3, {"mesh_param": experts})
    with pytest.raises(PlanError, match=r"give a mesh or shard_size, not both"):
        _by_shard(3, {"mesh": mesh, "shard_size": 1})
    with pytest.raises(UsageError, match=r"initialize\(mpu=...\): a torch DeviceMesh is needed"):
        _by_initialize(3, {"mpu": object()})
    _by_initialize(3, {"mesh_param": (2, 1)})


def test_what_a_mesh_says_and_nothing_uses_is_refused_by_name() -> None:
    run_ranks(2, _refused)
