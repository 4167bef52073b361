"""State on disk trains to the bits of state in host memory, in the memory that the plan counts."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.disk import disk_folder, spill_descriptors
from tests.support.distributed import run_ranks
from tests.support.models import Batch, Task, square_loss
from tests.support.offload import assert_a_skip_changes_nothing, offloaded, recipe, train
from tests.support.training import Setting, adamw, assert_same, build, full_parameters, sgd, shard_task
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.step.attached import stepper_of
from zeroshard.errors import PlanError
from zeroshard.nvme.memory import NvmeMemory
from zeroshard.nvme.places import Spill
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.optim.updates import FlatUpdate
from zeroshard.plan.builder import Recipe
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import WINDOWS, disk_nbytes, host_nbytes, in_blocks
from zeroshard.plan.placement import StateKind, Tier
from zeroshard.plan.policy import HostUpdate

WIDTH = 64
BLOCK_OF_ELEMENTS = 1024


class Deep(nn.Module):
    """Blocks whose state takes several windows, and none of whose sizes is a multiple of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)) for _ in range(3)])
        self.outer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.outer(x)


TASK = Task(Deep, square_loss)


def on_disk(plan: Recipe, folders: Sequence[Path], *, window: int = BLOCK_OF_ELEMENTS, encrypt: bool = False) -> Recipe:
    """A recipe with offload, its master weights and moments in files."""
    assert plan.offload is not None
    spill = Spill(tuple(map(str, folders)), encrypt)
    return replace(plan, offload=replace(plan.offload, tier=Tier.NVME, spill=spill, window_numel=window))


def _memory(model: nn.Module) -> NvmeMemory:
    memory = handle_of(model).runtime.storage.tiers[Tier.NVME]
    assert isinstance(memory, NvmeMemory)
    return memory


CASES: list[tuple[int, int, float, str | None, int, Callable[[nn.Module], torch.optim.Optimizer]]] = [
    # stage, micro-batches, share of the state on disk, compute dtype, elements of a window
    (3, 1, 1.0, "bf16", BLOCK_OF_ELEMENTS, adamw),
    (1, 2, 0.5, None, BLOCK_OF_ELEMENTS, adamw),
    (2, 1, 1.0, None, 300, sgd),
    (3, 2, 0.5, "bf16", 300, adamw),
]


def _bits(rank: int, world: int, folder: Path) -> None:
    for stage, micro, ratio, param, window, optimizer in CASES:
        plan = offloaded(recipe(stage, param), ratio=ratio)
        setting = Setting(plan=plan, steps=3, micro=micro, clip=0.5, optimizer=optimizer)
        expected = train(*shard_task(TASK, setting), TASK, setting, rank)
        disk = setting.at(on_disk(plan, [folder], window=window))
        found = train(*shard_task(TASK, disk), TASK, disk, rank)
        what = f"stage {stage}, {micro} micro-batches, {ratio}, {param}, windows of {window}, {optimizer.__name__}"
        assert found.losses == expected.losses, what
        assert_same(found.parameters, expected.parameters, what)
        assert spill_descriptors(folder) == [], "closing the model gives the space back"


@pytest.mark.parametrize("world", [1, 2])
def test_state_on_disk_gives_the_bits_of_state_in_host_memory(world: int, tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(world, _bits, folder)


def _three_places(rank: int, world: int, folder: Path) -> None:
    for stage, micro, ratio, param_too in ((1, 2, 0.75, False), (3, 1, 1.0, True), (2, 1, 0.8, False)):
        plan = offloaded(recipe(stage, "bf16"), ratio=ratio, param=param_too)
        setting = Setting(plan=plan, steps=3, micro=micro, clip=0.5)
        expected = train(*shard_task(TASK, setting), TASK, setting, rank)
        disk = on_disk(plan, [folder], window=300)
        assert disk.offload is not None
        offload = replace(disk.offload, host_ratio=0.4, param_tier=Tier.NVME if param_too else Tier.HOST)
        mixed = setting.at(replace(disk, offload=offload))
        model, optimizer = shard_task(TASK, mixed)
        held = [group.moments.tier for _, group in zeroshard.plan_of(model).groups() if group.moments is not None]
        places = [Tier.HOST, Tier.NVME] if ratio == 1 else [Tier.DEVICE, Tier.HOST, Tier.NVME]
        assert list(dict.fromkeys(held)) == places, "in the order of the forward"
        found = train(model, optimizer, TASK, mixed, rank)
        assert found.losses == expected.losses
        assert_same(found.parameters, expected.parameters, f"{places} at stage {stage}")


def test_state_on_the_device_in_host_memory_and_on_disk_trains_in_one_plan(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _three_places, folder)


def _at_once(rank: int, world: int, folder: Path) -> None:
    disk = on_disk(offloaded(recipe(3, "bf16")), [folder], window=300)
    assert disk.offload is not None
    mixed = replace(disk, offload=replace(disk.offload, host_ratio=0.4))
    model, optimizer = shard_task(TASK, Setting(plan=mixed))
    update = stepper_of(model).update
    assert isinstance(update, FlatUpdate)
    begun, apply_region = threading.Event(), update.apply_region

    def waiting(number: int, coefficient: float, active: Sequence[bool], hyper: Sequence[Mapping[str, Any]]) -> None:
        if update.regions[number].window is not None:
            begun.set()
        else:
            assert begun.wait(20), "what is on disk is updated later"
        apply_region(number, coefficient, active, hyper)

    update.apply_region = waiting
    _step(model, optimizer, 0, rank)
    zeroshard.close(model)


def test_state_on_disk_is_updated_while_state_in_host_memory_is(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(1, _at_once, folder)


def _striped_and_encrypted(rank: int, world: int, folder: Path, encrypt: bool) -> None:
    folders = [folder / "a", folder / "b"]
    plan = offloaded(recipe(3, "bf16"))
    setting = Setting(plan=plan, steps=3, clip=0.5)
    expected = train(*shard_task(TASK, setting), TASK, setting, rank)
    disk = setting.at(on_disk(plan, folders, encrypt=encrypt))
    assert_same(train(*shard_task(TASK, disk), TASK, disk, rank).parameters, expected.parameters, f"{encrypt}")


@pytest.mark.parametrize("encrypt", [False, True])
def test_several_folders_and_encryption_change_no_bits(tmp_path: Path, encrypt: bool) -> None:
    if encrypt:
        pytest.importorskip("cryptography")
    with disk_folder(tmp_path) as folder:
        for name in ("a", "b"):
            (folder / name).mkdir()
        run_ranks(2, _striped_and_encrypted, folder, encrypt)


def _bytes(rank: int, world: int, folder: Path) -> None:
    model, optimizer = shard_task(TASK, Setting(plan=on_disk(offloaded(recipe(3, "bf16")), [folder]), steps=1))
    plan, memory = zeroshard.plan_of(model), _memory(model)
    kinds = (StateKind.MASTER, StateKind.MOMENTS)
    assert memory.used == sum(group.held_on(Tier.NVME, kind) for _, group in plan.groups() for kind in kinds)
    assert state_bytes(plan).disk == disk_nbytes(plan) >= memory.used
    assert memory.pinned == 0
    host = handle_of(model).runtime.storage.tiers[Tier.HOST]
    assert host.used == host_nbytes(plan) == state_bytes(plan).host
    grads = sum(group.held_on(Tier.HOST, StateKind.GRAD) for _, group in plan.groups())
    assert host.used - grads == WINDOWS * 3 * in_blocks(4 * BLOCK_OF_ELEMENTS), "windows, whatever the model's size"
    del optimizer
    zeroshard.close(model)


def test_disk_and_host_memory_hold_the_bytes_of_the_plan(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _bytes, folder)


def _skips(rank: int, world: int, folder: Path) -> None:
    plain = offloaded(recipe(3, "fp16"))
    assert_a_skip_changes_nothing(TASK, plain, lambda plan: on_disk(plan, [folder]), rank, skipped=1)


def test_a_step_that_is_skipped_in_float16_leaves_the_disk_as_it_was(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(1, _skips, folder)


def _step(model: nn.Module, optimizer: ShardedOptimizer, number: int, rank: int) -> None:
    TASK.loss(model, Batch(number, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _saved(rank: int, world: int, folder: Path, checkpoint: Path) -> None:
    setting = Setting(plan=on_disk(offloaded(recipe(3, "bf16")), [folder]))
    host = Setting(plan=offloaded(recipe(3, "bf16")))
    model, optimizer = shard_task(TASK, setting)
    expected, expected_optimizer = shard_task(TASK, host)
    for number in range(2):
        _step(model, optimizer, number, 0)
        _step(expected, expected_optimizer, number, 0)
    zeroshard.save(model, checkpoint, "disk")
    zeroshard.save(expected, checkpoint, "host")
    for one in (model, expected):
        zeroshard.close(one)


def _loaded(rank: int, world: int, folder: Path, checkpoint: Path) -> None:
    """At another number of ranks: from disk to disk and to host memory, and from host memory to disk."""
    found: list[dict[str, torch.Tensor]] = []
    host = offloaded(recipe(3, "bf16"))
    for tag, plan in (
        ("host", host),
        ("disk", host),
        ("disk", on_disk(host, [folder])),
        ("host", on_disk(host, [folder])),
    ):
        model, optimizer = shard_task(TASK, Setting(plan=plan))
        zeroshard.load(model, checkpoint, tag)
        parameter = next(p for p in model.parameters() if p.ndim == 2)
        state = zeroshard.safe_get_full_optimizer_state(parameter, "exp_avg_sq")
        assert state is not None
        _step(model, optimizer, 2, 0)
        found.append({**full_parameters(model), "state": state})
        zeroshard.close(model)
    for other in found[1:]:
        assert_same(other, found[0], "loaded and trained on")


def test_checkpoints_go_on_at_other_ranks_and_tiers_to_the_bit(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _saved, folder, tmp_path / "saved")
        run_ranks(1, _loaded, folder, tmp_path / "saved")


def _flat(rank: int, world: int, folder: Path) -> None:
    model, optimizer = shard_task(TASK, Setting(plan=on_disk(offloaded(recipe(3, "bf16")), [folder])))
    resident: list[int] = []
    for number in range(60):
        _step(model, optimizer, number, rank)
        if number >= 20:
            gc.collect()
            pages = Path("/proc/self/statm").read_text().split()[1]
            resident.append(int(pages) * 4096)
    assert max(resident) - min(resident) < 4 << 20, resident
    zeroshard.close(model)


def test_host_memory_stays_flat_over_many_steps(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(1, _flat, folder)


def _refused(rank: int, world: int, folder: Path) -> None:
    wrong = folder / f"only-{rank}"
    if rank == 0:
        (folder / "only-0").mkdir()
    else:
        wrong = folder / "only-0" / "absent"
    model = build(TASK)
    plan = on_disk(offloaded(recipe(3, "bf16")), [wrong])
    with pytest.raises(PlanError, match=r"rank 1: .*absent does not exist"):
        zeroshard.shard(model, adamw(model), plan=plan)
    assert spill_descriptors(folder) == []
    streamed = on_disk(offloaded(recipe(3, "bf16"), HostUpdate.STREAMED), [folder])
    with pytest.raises(PlanError, match="state on disk are updated by the processor"):
        zeroshard.shard(model, adamw(model), plan=streamed)


def test_a_folder_that_is_wrong_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _refused, folder)
