"""A disk that fails in mid-step ends the run on all ranks with an error that names rank and folder; nothing hangs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from tests.engine.offload.test_on_disk import TASK, on_disk
from tests.support.disk import FailingTransfers, disk_folder, spill_descriptors
from tests.support.distributed import run_ranks
from tests.support.models import Batch
from tests.support.offload import offloaded, recipe
from tests.support.training import Setting, adamw, assert_same, build, full_parameters, shard_task
from zeroshard.errors import SpillError, ZeroShardError
from zeroshard.nvme.memory import NvmeMemory
from zeroshard.nvme.places import Spill
from zeroshard.nvme.transfers import DiskStalled, FileEnded
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.offload import disk_nbytes
from zeroshard.plan.placement import Tier
from zeroshard.plan.plan import Plan


class _Disk:
    """Makes the memory of one rank, on a disk that fails when it is told to."""

    def __init__(self, folder: Path, rank: int, error: OSError, *, write: bool) -> None:
        self._spill, self._rank = Spill((str(folder),)), rank
        self.transfers = FailingTransfers(error, write=write)

    def __call__(self, plan: Plan, device: torch.device) -> NvmeMemory:
        return NvmeMemory(self._spill, self._rank, disk_nbytes(plan), make_transfers=lambda: self.transfers)


def _model_on(disk: _Disk, folder: Path, stage: int = 3) -> tuple[nn.Module, ShardedOptimizer]:
    model = build(TASK)
    plan = on_disk(offloaded(recipe(stage, "bf16")), [folder])
    return zeroshard.shard(model, adamw(model), plan=plan, tiers={Tier.NVME: disk})


def _step(model: nn.Module, optimizer: ShardedOptimizer, number: int, rank: int) -> None:
    TASK.loss(model, Batch(number, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _train_until_it_fails(model: nn.Module, optimizer: ShardedOptimizer, rank: int) -> None:
    for number in range(1, 50):
        _step(model, optimizer, number, rank)


def _one_of_two_fails(rank: int, world: int, folder: Path, checkpoint: Path) -> None:
    disk = _Disk(folder, rank, OSError(errno.EIO, "Input/output error"), write=False)
    model, optimizer = _model_on(disk, folder)
    _step(model, optimizer, 0, rank)
    zeroshard.save(model, checkpoint, "before")
    saved = full_parameters(model)
    if rank == 1:
        disk.transfers.fail_after(60)
    with pytest.raises(ZeroShardError, match=rf"rank 1: a read of its file in {folder} failed: .*\(errno 5\)") as first:
        _train_until_it_fails(model, optimizer, rank)
    assert isinstance(first.value, SpillError) == (rank == 1)
    with pytest.raises(ZeroShardError, match=r"rank 1: a read of"):
        _train_until_it_fails(model, optimizer, rank)
    zeroshard.close(model)
    assert spill_descriptors(folder) == []
    assert (checkpoint / "before").is_dir()
    if rank == 0:
        torch.save(saved, checkpoint.parent / "parameters.pt")


def _gone_on(rank: int, world: int, checkpoint: Path) -> None:
    model, _ = shard_task(TASK, Setting(plan=offloaded(recipe(3, "bf16"))))
    zeroshard.load(model, checkpoint)
    expected = torch.load(checkpoint.parent / "parameters.pt")
    assert_same(full_parameters(model), expected, "the last checkpoint")


def test_an_error_of_one_disk_ends_the_step_of_all_ranks_and_leaves_the_checkpoint(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _one_of_two_fails, folder, tmp_path / "saved")
        run_ranks(2, _gone_on, tmp_path / "saved")


def _write_through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


@torch.no_grad()
def _write_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


def _fails_while_a_write_is_kept(rank: int, world: int, folder: Path) -> None:
    for write_parameters in (_write_through_data, _write_in_place):
        for write in (False, True):
            disk = _Disk(folder, rank, OSError(errno.EIO, "Input/output error"), write=write)
            model, optimizer = _model_on(disk, folder, stage=2)
            _step(model, optimizer, 0, rank)
            write_parameters(model)
            if rank == 1:
                disk.transfers.fail_after(0)
            with pytest.raises(ZeroShardError, match=rf"rank 1: a (read of|write to) its file in {folder} failed"):
                _step(model, optimizer, 1, rank)
            zeroshard.close(model)


def test_a_disk_that_fails_while_a_write_of_the_user_is_kept_is_named_on_all_ranks(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _fails_while_a_write_is_kept, folder)


ERRORS = [
    (OSError(errno.EIO, os.strerror(errno.EIO)), r"failed: Input/output error \(errno 5\)"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), r"failed: No space left on device \(errno 28\)"),
    (OSError(errno.ENODEV, os.strerror(errno.ENODEV)), r"failed: No such device \(errno 19\)"),
    (FileEnded(errno.ENODATA, "the file ended early"), "found less than was written there"),
    (DiskStalled(errno.ETIMEDOUT, "no answer in 120 seconds"), "no answer in 120 seconds; the disk has stalled"),
]


def _each_error(rank: int, world: int, folder: Path, checkpoint: Path) -> None:
    for error, told in ERRORS:
        for write in (False, True):
            disk = _Disk(folder, rank, error, write=write)
            model, optimizer = _model_on(disk, folder)
            _step(model, optimizer, 0, rank)
            disk.transfers.fail_after(20)
            what = "a write to" if write else "a read of"
            with pytest.raises(SpillError, match=f"rank 0: {what} its file in {folder} .*{told}"):
                _train_until_it_fails(model, optimizer, rank)
            with pytest.raises(SpillError, match=told):
                zeroshard.save(model, checkpoint, "after")
            zeroshard.close(model)
            assert not (checkpoint / "after").exists()


def test_every_error_of_a_disk_is_named_and_nothing_is_saved_after_it(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(1, _each_error, folder, tmp_path / "saved")
