"""A tier is an object that the engine is given: one of files, in a file of the tests, does what host memory does."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.cases import sample
from tests.support.distributed import run_ranks
from tests.support.file_tier import FileTier
from tests.support.models import Batch, Task, square_loss
from tests.support.offload import offloaded, recipe, train
from tests.support.training import Setting, adamw, assert_same, build, full_parameters, sgd, shard_task
from tests.support.zoo import Stack
from zeroshard.engine.core.handle import handle_of
from zeroshard.errors import PlanError
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.builder import Recipe
from zeroshard.plan.offload import host_nbytes
from zeroshard.plan.placement import StateKind, Tier
from zeroshard.plan.policy import HostUpdate

TASK = Task(Stack, square_loss)
CASES = [
    # update, stage, micro-batches, share of the state in files, parameters there (or in host memory if streamed)
    (HostUpdate.PROCESSOR, 3, 1, 1.0, False),
    (HostUpdate.STREAMED, 3, 1, 1.0, False),
    (HostUpdate.PROCESSOR, 1, 2, 0.5, False),
    (HostUpdate.PROCESSOR, 3, 2, 1.0, True),
    (HostUpdate.STREAMED, 2, 2, 0.5, False),
    (HostUpdate.STREAMED, 3, 1, 1.0, True),
]


def _in_files(plan: Recipe) -> Recipe:
    offload = plan.offload
    assert offload is not None
    both = offload.param and offload.update is HostUpdate.PROCESSOR
    return replace(plan, offload=replace(offload, tier=Tier.NVME, param_tier=Tier.NVME if both else Tier.HOST))


def _shard(folder: Path, setting: Setting) -> tuple[nn.Module, ShardedOptimizer, FileTier]:
    tier, model = FileTier(folder), build(TASK)
    accumulate, clip = setting.micro > 1, setting.clip
    plan = setting.plan if isinstance(setting.plan, int) else _in_files(setting.plan)
    model, optimizer = zeroshard.shard(
        model, setting.optimizer(model), plan=plan, accumulate=accumulate, clip_norm=clip, tiers={Tier.NVME: tier}
    )
    return model, optimizer, tier


def _bits(rank: int, world: int, folder: Path) -> None:
    numbers = itertools.count()
    for update, stage, micro, ratio, param_too in sample(CASES):
        for param, optimizer in ((None, adamw), ("bf16", adamw), ("bf16", sgd)):
            if update is HostUpdate.STREAMED and optimizer is sgd:
                continue
            plan = offloaded(recipe(stage, param), update, ratio, param=param_too)
            setting = Setting(plan=plan, steps=3, micro=micro, clip=0.5, optimizer=optimizer)
            expected = train(*shard_task(TASK, setting), TASK, setting, rank)
            model, sharded, _ = _shard(folder / f"{rank}-{next(numbers)}", setting)
            what = f"{update.value}, stage {stage}, {micro} micro-batches, {ratio}, {param}, {optimizer.__name__}"
            assert_same(train(model, sharded, TASK, setting, rank).parameters, expected.parameters, what)


@pytest.mark.parametrize("world", [1, 2])
def test_state_in_files_gives_the_bits_of_state_in_host_memory(world: int, tmp_path: Path) -> None:
    run_ranks(world, _bits, tmp_path)


def _bytes(rank: int, world: int, folder: Path) -> None:
    for update in HostUpdate:
        setting = Setting(plan=offloaded(recipe(3, "bf16"), update), steps=1)
        model, _, tier = _shard(folder / f"{rank}-{update.value}", setting)
        plan, memory = zeroshard.plan_of(model), tier.memory
        assert memory is not None
        kinds = (StateKind.MASTER, StateKind.MOMENTS)
        assert memory.used == sum(group.held_on(Tier.NVME, kind) for _, group in plan.groups() for kind in kinds)
        assert memory.used == sum(file.stat().st_size for file in memory.folder.iterdir())
        assert handle_of(model).runtime.storage.tiers[Tier.HOST].used == host_nbytes(plan)
        zeroshard.close(model)


def test_files_and_host_memory_hold_the_bytes_of_the_plan(tmp_path: Path) -> None:
    run_ranks(2, _bytes, tmp_path)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    TASK.loss(model, Batch(number, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _saved(rank: int, world: int, folder: Path) -> None:
    setting = Setting(plan=offloaded(recipe(3, "bf16")))
    plain, plain_optimizer = shard_task(TASK, setting)
    model, optimizer, _ = _shard(folder / f"{rank}-first", setting)
    for number in range(2):
        _step(plain, plain_optimizer, number, rank)
        _step(model, optimizer, number, rank)
    zeroshard.save(model, folder / "saved", "first")
    again, again_optimizer, _ = _shard(folder / f"{rank}-again", setting)
    zeroshard.load(again, folder / "saved")
    host, host_optimizer = shard_task(TASK, setting)
    zeroshard.load(host, folder / "saved")
    for one, its_optimizer in ((plain, plain_optimizer), (again, again_optimizer), (host, host_optimizer)):
        _step(one, its_optimizer, 2, rank)
    assert_same(full_parameters(again), full_parameters(plain), "gone on from files")
    assert_same(full_parameters(host), full_parameters(plain), "gone on in host memory")


def test_a_checkpoint_of_it_goes_on_in_files_and_in_host_memory(tmp_path: Path) -> None:
    run_ranks(2, _saved, tmp_path)


def _from_outside(rank: int, world: int, folder: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    setting = Setting(plan=offloaded(recipe(3, "bf16")))
    for model, optimizer in (shard_task(TASK, setting), _shard(folder / str(rank), setting)[:2]):
        _step(model, optimizer, 0, rank)
        name, parameter = next((n, p) for n, p in model.named_parameters() if p.ndim == 2)
        values = zeroshard.safe_get_full_fp32_param(parameter)
        zeroshard.safe_set_full_fp32_param(parameter, values * 1.001)
        moment = zeroshard.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert moment is not None
        zeroshard.safe_set_full_optimizer_state(parameter, moment * 0.5, "exp_avg")
        with zeroshard.GatheredParameters([parameter], modifier_rank=0):
            if rank == 0:
                with torch.no_grad():
                    parameter[0].mul_(2)
        _step(model, optimizer, 1, rank)
        found.append({**full_parameters(model), "state": zeroshard.safe_get_full_optimizer_state(parameter, "exp_avg")})
        assert name in found[-1]
    assert_same(found[1], found[0], "read and set from outside of the step")


def test_it_is_read_and_set_from_outside_of_the_step(tmp_path: Path) -> None:
    run_ranks(2, _from_outside, tmp_path)


def _refused(rank: int, world: int, folder: Path) -> None:
    model = build(TASK)
    plan = zeroshard.plan_of(shard_task(TASK, Setting(plan=offloaded(recipe(3, "bf16"), param=True)))[0])
    text = plan.to_json().replace('"tier": "host"', '"tier": "nvme"').replace('"window_numel": 0', '"window_numel": 9')
    moved = type(plan).from_json(text)
    with pytest.raises(PlanError, match="grad rests on 'nvme', where all other state can rest"):
        zeroshard.shard(model, adamw(model), plan=moved, tiers={Tier.NVME: FileTier(folder / str(rank))})


def test_what_is_written_where_it_lies_is_refused_there(tmp_path: Path) -> None:
    run_ranks(1, _refused, tmp_path)


def _closed(rank: int, world: int, folder: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    setting = Setting(plan=offloaded(recipe(3, "bf16")))
    for in_files in (False, True):
        model, optimizer = _shard(folder / str(rank), setting)[:2] if in_files else shard_task(TASK, setting)
        _step(model, optimizer, 0, rank)
        trained = full_parameters(model)
        zeroshard.close(model)
        with zeroshard.GatheredParameters(model.parameters()):
            assert_same({name: p.detach().float() for name, p in model.named_parameters()}, _rounded(trained), "closed")
        again, optimizer = zeroshard.shard(model, adamw(model), plan=setting.plan)
        assert_same(full_parameters(again), trained, "with the precision of master weights")
        _step(again, optimizer, 1, rank)
        found.append(full_parameters(again))
    assert_same(found[1], found[0], "closed in files, and trained on in host memory")


def _rounded(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.bfloat16().float() for name, value in values.items()}


def test_a_closed_model_keeps_its_master_weights_in_memory(tmp_path: Path) -> None:
    run_ranks(2, _closed, tmp_path)
