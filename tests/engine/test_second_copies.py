"""Parameters that each subgroup of ranks holds once more (hpZ): the numbers of ZeRO-3, and gathers that stay inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.plan.specs import blocks
from tests.support.distributed import run_ranks
from tests.support.measure import forget_sent, held_bytes, sent
from tests.support.models import WIDTH, Batch, Task, square_loss
from tests.support.training import adamw, build
from tests.support.zoo import Mlp, Stack
from zeroshard.config import load_config
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.core.streams import Step
from zeroshard.errors import ConfigError, PlanError, UsageError
from zeroshard.mesh import NESTED, REPLICATE, SHARD, Mesh
from zeroshard.plan.builder import Recipe, build_plan
from zeroshard.plan.legs import Stream
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import Offload
from zeroshard.plan.placement import STAGES
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import ExecutionPolicy
from zeroshard.plan.traffic import step_traffic

TASK = Task(Stack, square_loss)
STEPS = 3
Values = dict[str, torch.Tensor]


def _recipe(mesh: Mesh, **changes: Any) -> Recipe:
    row = STAGES[3].with_second_copies(mesh) if mesh.size((REPLICATE,)) > 1 else STAGES[3]
    accumulate = changes.pop("accumulate", False)
    return Recipe(sharding=row, policy=ExecutionPolicy(accumulate=accumulate, clip_norm=0.5), **changes)


def _whole(model: nn.Module) -> Values:
    return {name: value.clone() for name, value in zeroshard.iterate_full_parameters(model)}


def _train(model: nn.Module, optimizer: Any, rank: int, micro_batches: int, first: int = 0) -> None:
    for step in range(first, first + STEPS):
        zeroshard.drain(model)
        forget_sent(model)
        for micro in range(micro_batches):
            (TASK.loss(model, Batch(step, micro, rank)) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()


def _trained(rank: int, mesh: Mesh, micro_batches: int, changes: dict[str, Any]) -> tuple[Values, Plan]:
    """The parameters after some steps, on a plan whose bytes and traffic are what was measured."""
    model = build(TASK)
    if changes.pop("freeze", False):
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
    recipe = _recipe(mesh, accumulate=micro_batches > 1, **changes)
    model, optimizer = zeroshard.shard(model, adamw(model), plan=recipe, mesh=mesh)
    _train(model, optimizer, rank, micro_batches)
    plan = zeroshard.plan_of(model)
    assert sent(model) == step_traffic(plan, micro_batches=micro_batches)
    assert held_bytes(model).total == state_bytes(plan).total
    found = _whole(model)
    zeroshard.close(model)
    with zeroshard.GatheredParameters(list(model.parameters())):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach().to(found[name].dtype), found[name], rtol=0, atol=0)
    return found, plan


def _as_one_group(rank: int, world: int, subgroup: int, micro_batches: int, changes: dict[str, Any]) -> None:
    expected, _ = _trained(rank, Mesh.data_parallel(world), micro_batches, dict(changes))
    found, plan = _trained(rank, Mesh.data_parallel(world, subgroup), micro_batches, dict(changes))
    assert {unit.axes for unit in plan.units} == {NESTED}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("world", "subgroup", "micro_batches", "changes"),
    [
        (4, 2, 2, {}),
        (6, 3, 1, {}),
        (4, 2, 1, {"offload": Offload()}),
        (4, 2, 2, {"offload": Offload(param=True)}),
        (4, 2, 2, {"freeze": True, "persistence_threshold": 40}),
    ],
    ids=["accumulated", "3 x 2", "state on the host", "parameters on the host", "frozen and persistent"],
)
def test_steps_are_those_of_zero_3(world: int, subgroup: int, micro_batches: int, changes: dict[str, Any]) -> None:
    run_ranks(world, _as_one_group, subgroup, micro_batches, changes)


def _gather_bytes(plan: Plan, outer: tuple[str, ...]) -> int:
    legs = (leg for unit in plan.legs for group in unit for leg in (*group.refresh, *group.gather))
    return sum(leg.nbytes for leg in legs if leg.axes == outer)


def test_gathers_leave_a_subgroup_once_a_step() -> None:
    mesh = Mesh.data_parallel(8, 4)
    plan = build_plan(blocks(3), Recipe(sharding=STAGES[3].with_second_copies(mesh)), mesh)
    whole = sum(group.gathered_nbytes for _, group in plan.groups())
    assert _gather_bytes(plan, (REPLICATE,)) == whole // 4  # each rank brings a quarter of what its node lacks
    block = plan.units[1].gathered_nbytes
    for micro_batches in (1, 3):  # all but what leaves the subgroup once are gathers of blocks within it
        gathered = step_traffic(plan, micro_batches=micro_batches, no_sync=True).nbytes["all-gather"]
        assert (gathered - whole // 4) % block == 0
    assert _gather_bytes(plan, (SHARD,)) == whole


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def _config(**zero: Any) -> dict[str, Any]:
    return {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], **zero}}


def _from_config(rank: int, world: int) -> None:
    found: list[Values] = []
    mics = {"mics_shard_size": 2, "mics_hierarchical_params_gather": True}
    for zero in ({}, {"zero_hpz_partition_size": 2}, mics):
        engine, *_ = zeroshard.initialize(model=build(TASK), config=_config(**zero))
        for step in range(STEPS):
            engine.backward(TASK.loss(engine, Batch(step, 0, rank)))
            engine.step()
        axes = {unit.axes for unit in engine.plan.units}
        assert axes == ({NESTED} if "zero_hpz_partition_size" in zero else {(SHARD,)} if zero else axes)
        found.append(_whole(engine.module))
        engine.destroy()
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match="leave one of them out"):
        zeroshard.initialize(
            model=build(TASK),
            config=_config(mics_shard_size=2),
            mesh_param=init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",)),
        )


def test_the_config_names_subgroups() -> None:
    run_ranks(4, _from_config)


def _reads_and_writes(rank: int, world: int, folder: str) -> None:
    """What reads and writes parameters outside of steps finds second copies current, and leaves them so."""

    def made(hpz: int) -> zeroshard.Engine:
        return zeroshard.initialize(model=build(TASK), config=_config(zero_hpz_partition_size=hpz))[0]

    def trained(engine: zeroshard.Engine, first: int) -> Values:
        for step in range(first, first + STEPS):
            engine.backward(TASK.loss(engine, Batch(step, 0, rank)))
            engine.step()
        return _whole(engine.module)

    engine = made(2)
    trained(engine, 0)
    parameter = next(iter(engine.module.parameters()))
    with zeroshard.GatheredParameters([parameter], modifier_rank=1), torch.no_grad():
        if rank == 1:
            parameter.fill_(0.125)
    value = zeroshard.safe_get_full_fp32_param(parameter)
    assert bool((value == 0.125).all())
    before = TASK.loss(engine, Batch(9, 0, 0)).detach().clone()
    engine.offload_states()
    engine.reload_states()
    torch.testing.assert_close(TASK.loss(engine, Batch(9, 0, 0)).detach(), before, rtol=0, atol=0)
    zeroshard.safe_set_full_fp32_param(parameter, torch.full_like(value, 0.5))
    assert not torch.equal(TASK.loss(engine, Batch(9, 0, 0)).detach(), before)
    engine.save_checkpoint(folder)
    expected = trained(engine, STEPS)
    engine.destroy()
    for hpz in (1, 2):
        other = made(hpz)
        other.load_checkpoint(folder)
        for name, found in trained(other, STEPS).items():
            torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-6)
        other.destroy()


def test_a_write_or_a_load_renews_the_copies(tmp_path: Path) -> None:
    run_ranks(4, _reads_and_writes, str(tmp_path))


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 2, "zero_hpz_partition_size": 2}, "is for stage 3"),
        ({"stage": 0, "mics_shard_size": 2}, "nothing is divided"),
        ({"zero_hpz_partition_size": 3}, "does not divide 4 ranks"),
        ({"zero_hpz_partition_size": 2, "mics_shard_size": 2}, "give one of them"),
        ({"stage": "auto", "mics_shard_size": 2}, "does not choose among subgroups"),
    ],
)
def test_subgroups_that_mean_nothing_are_refused_by_name(zero: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(_config(**zero), world_size=4)


def _with_muon(rank: int, world: int) -> None:
    model, mesh = build(TASK), Mesh.data_parallel(world, 2)
    for optimizer in (zeroshard.MuonAdamW, zeroshard.Dion):
        with pytest.raises(PlanError, match=optimizer.__name__.removesuffix("AdamW")):
            zeroshard.shard(model, optimizer(model.named_parameters()), plan=_recipe(mesh), mesh=mesh)


def test_optimizers_of_whole_matrices_are_refused() -> None:
    run_ranks(4, _with_muon)


class _ReadsAhead(nn.Module):
    """Reads the weight of a module that comes later than what is gathered ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp() for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ next(self.blocks[5].parameters())[:WIDTH, :WIDTH].t()
        for block in self.blocks:
            x = block(x)
        return x


def _fails_once(rank: int, world: int, subgroup: int) -> None:
    task = Task(_ReadsAhead, square_loss)
    plain, model = build(task), build(task)
    mesh = Mesh.data_parallel(world, subgroup)
    model, _ = zeroshard.shard(model, adamw(model), plan=_recipe(mesh), mesh=mesh)
    streams = handle_of(model).runtime.streams
    run, failed = streams.run, list[Step]()

    def run_or_fail(stream: Stream, steps: Sequence[Step]) -> None:
        if not failed and any(name[0] == "beside" for step in steps for name in step.writes):
            failed.extend(steps)
            raise RuntimeError("out of memory")
        run(stream, steps)

    streams.run = run_or_fail
    batch = Batch(0, 0, rank)
    with pytest.raises(RuntimeError, match="out of memory"):
        task.loss(model, batch)
    assert any("second" in name for step in failed for name in step.writes) == (subgroup < world)
    torch.testing.assert_close(task.loss(model, batch), task.loss(plain, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("world", "subgroup"), [(4, 2), (2, 2)], ids=["second copies", "one axis"])
def test_a_read_whose_gather_failed_is_gathered_again(world: int, subgroup: int) -> None:
    run_ranks(world, _fails_once, subgroup)
