"""Writes to whole parameters are found without reading their master weights, where these rest off the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from tests.engine.offload.test_on_disk import TASK, on_disk
from tests.support.disk import disk_folder
from tests.support.distributed import run_ranks
from tests.support.models import Batch
from tests.support.offload import offloaded, recipe
from tests.support.training import Setting, assert_close, assert_same, full_parameters, shard_task
from zeroshard.engine.core.handle import handle_of
from zeroshard.nvme.memory import NvmeMemory
from zeroshard.plan.placement import Tier
from zeroshard.plan.traffic import disk_traffic

STEPS = 5
CHECKED = 3
"""Steps at the start that look for writes that version counters do not show."""
Change = Callable[[nn.Module, int], object]


def _train(setting: Setting, rank: int, change: Change = lambda model, step: None) -> dict[str, torch.Tensor]:
    """`change` may write parameters after each step."""
    model, optimizer = shard_task(TASK, setting)
    for number in range(STEPS):
        TASK.loss(model, Batch(number, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        change(model, number)
    found = full_parameters(model)
    zeroshard.close(model)
    return found


def _clamp(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def _kept(rank: int, world: int, folder: Path) -> None:
    for stage in (1, 2):
        for ratio in (1.0, 0.5):
            exact = Setting(plan=recipe(stage, "bf16"))
            host = exact.at(offloaded(recipe(stage, "bf16"), ratio=ratio))
            expected = _train(exact, rank, _clamp)
            unwritten = _train(exact, rank)
            assert not any(torch.equal(unwritten[name], value) for name, value in expected.items()), "no write was kept"
            found = _train(host, rank, _clamp)
            assert_close(found, expected)
            disk = exact.at(on_disk(offloaded(recipe(stage, "bf16"), ratio=ratio), [folder]))
            assert_same(_train(disk, rank, _clamp), found, f"disk, stage {stage}, {ratio}")


@pytest.mark.parametrize("world", [1, 2])
def test_writes_through_data_are_kept_wherever_master_weights_rest(world: int, tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(world, _kept, folder)


def _nothing_read(rank: int, world: int, folder: Path) -> None:
    setting = Setting(plan=on_disk(offloaded(recipe(2, "bf16")), [folder]))
    model, optimizer = shard_task(TASK, setting)
    memory = handle_of(model).runtime.storage.tiers[Tier.NVME]
    assert isinstance(memory, NvmeMemory)
    start, found = memory.volume.start, [0]

    def counted(*, write: bool, at: int, address: int, nbytes: int) -> object:
        found[-1] += 0 if write else nbytes
        return start(write=write, at=at, address=address, nbytes=nbytes)

    memory.volume.start = counted  # pyright: ignore[reportAttributeAccessIssue]
    for number in range(STEPS):
        TASK.loss(model, Batch(number, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        zeroshard.drain(model)
        found.append(0)
    assert found[-2] >= disk_traffic(zeroshard.plan_of(model)).read > 0
    assert found[:CHECKED] == found[CHECKED : CHECKED + 1] * CHECKED, "a checked step reads what every step reads"
    zeroshard.close(model)


@pytest.mark.parametrize("world", [1, 2])
def test_looking_for_writes_reads_nothing_from_the_disk(world: int, tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(world, _nothing_read, folder)


def _written_between(rank: int, world: int, folder: Path) -> None:
    """A load and a GatheredParameters write parameters and master weights together, which is no write of the user."""

    def through_blocks(model: nn.Module, step: int) -> None:
        weights = list(model.parameters())
        with zeroshard.GatheredParameters(weights, modifier_rank=0), torch.no_grad():
            for weight in weights:
                weight.mul_(0.75)

    exact = Setting(plan=recipe(2, "bf16"))
    expected = _train(exact, rank, through_blocks)
    disk = exact.at(on_disk(offloaded(recipe(2, "bf16")), [folder]))
    assert_close(_train(disk, rank, through_blocks), expected)


def test_what_gathered_parameters_writes_is_kept_with_master_weights_on_disk(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _written_between, folder)


def _all_near(model: nn.Module, value: float) -> bool:
    """Within bfloat16's rounding: split master weights keep the remainder that they had."""
    return all(bool(((one - value).abs() < 1e-3).all()) for one in full_parameters(model).values())


def _saved(rank: int, world: int, folder: Path) -> None:
    """A write behind the last step is in what is saved before the next one, as in torch."""
    for stage, dtype in ((1, "bf16"), (2, None)):
        host, disk = offloaded(recipe(stage, dtype)), on_disk(offloaded(recipe(stage, dtype)), [folder])
        for number, plan in enumerate((recipe(stage, dtype), host, disk)):
            setting = Setting(plan=plan)
            model, optimizer = shard_task(TASK, setting)
            TASK.loss(model, Batch(0, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data.fill_(0.25)
            zeroshard.save(model, folder / f"saved-{stage}", f"{number}")
            zeroshard.close(model)
            model, optimizer = shard_task(TASK, setting)
            zeroshard.load(model, folder / f"saved-{stage}", f"{number}")
            assert _all_near(model, 0.25), plan
            for parameter in model.parameters():
                parameter.data.fill_(0.5)
            assert _all_near(model, 0.5), plan
            zeroshard.close(model)


@pytest.mark.parametrize("world", [1, 2])
def test_a_write_behind_the_last_step_is_saved(world: int, tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(world, _saved, folder)
