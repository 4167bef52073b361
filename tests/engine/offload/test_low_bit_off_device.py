"""Moments in 8 and 4 bits in host memory and on disk: the bits of moments on the device, in the bytes of the plan."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.support.beside import needs_torchao, use_beside
from tests.support.cases import ALL_CASES
from tests.support.disk import FailingTransfers, disk_folder, spill_descriptors
from tests.support.distributed import run_ranks
from tests.support.measure import held_bytes
from tests.support.models import Batch, Task
from tests.support.offload import assert_a_skip_changes_nothing, recipe, train
from tests.support.training import Setting, assert_same, build, full_parameters, shard_task
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.step.attached import stepper_of
from zeroshard.engine.step.host_state_stepper import HostStateStepper
from zeroshard.errors import PlanError, SpillError
from zeroshard.nvme.memory import NvmeMemory
from zeroshard.nvme.places import Spill
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.builder import Recipe
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import Offload, disk_nbytes, host_nbytes
from zeroshard.plan.placement import Blocks, StateKind, Tier
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import HostUpdate

WIDTH = 64
PIECE = 1500
"""Elements of a piece, in whole blocks 1280: the matrices below take several, and the last is smaller."""


class _Block(nn.Module):
    """33 blocks of 256, which no number of ranks divides; a matrix of no whole blocks; few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 132), nn.Linear(132, WIDTH)
        self.odd = nn.Parameter(torch.randn(WIDTH, 65) * 0.1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) + (x @ self.odd)[:, :WIDTH]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: torch.Tensor, last: bool = True) -> torch.Tensor:
        for block in self.blocks[: 3 if last else 2]:
            x = block(x)
        return x


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The last block has no gradient in step 1, so its state must stay as it is."""
    return model(batch.normal(3, WIDTH), batch.step != 1).float().square().mean()


TASK = Task(_Model, _loss)


def _adam(kind: str = "AdamW8bit") -> Callable[[nn.Module], torch.optim.Optimizer]:
    hyper: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}

    def made(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        up, others = ([p for name, p in named if ("up" in name) is wanted] for wanted in (True, False))
        return getattr(zeroshard, kind)([{"params": others}, {"params": up, "lr": 5e-3}], **hyper)

    return made


def _offloaded(plain: Recipe, folder: Path | None, *, ratio: float = 1.0, host_ratio: float = 0.0) -> Recipe:
    offload = Offload(ratio, stream_numel=PIECE, window_numel=1100)
    if folder is not None:
        offload = replace(offload, tier=Tier.NVME, spill=Spill((str(folder),)), host_ratio=host_ratio)
    return replace(plain, offload=offload)


CASES: list[tuple[int, int, str | None, str, bool, float, float]] = [
    # stage, micro-batches, compute dtype, optimizer, disk, share off the device, of all in host memory beside the disk
    (3, 1, "bf16", "AdamW8bit", False, 1.0, 0.0),
    (1, 2, "bf16", "AdamW8bit", True, 1.0, 0.0),
    (2, 1, None, "Adam4bit", True, 1.0, 0.4),
    (3, 1, "bf16", "AdamW8bit", True, 0.7, 0.4),
    (3, 2, None, "AdamW8bit", False, 0.4, 0.0),
    (2, 2, "bf16", "AdamW4bit", True, 0.4, 0.0),
    (1, 1, None, "Adam8bit", False, 1.0, 0.0),
]


def _bits(rank: int, world: int, folder: Path) -> None:
    use_beside()
    for stage, micro, param, kind, disk, ratio, host_ratio in CASES if ALL_CASES or world == 2 else CASES[:4]:
        plain = recipe(stage, param)
        setting = Setting(plan=plain, steps=3, micro=micro, clip=0.5, optimizer=_adam(kind))
        expected = train(*shard_task(TASK, setting), TASK, setting, rank)
        away = setting.at(_offloaded(plain, folder if disk else None, ratio=ratio, host_ratio=host_ratio))
        found = train(*shard_task(TASK, away), TASK, away, rank)
        what = f"stage {stage}, {micro} micro-batches, {param}, {kind}, disk {disk}, {ratio}, {host_ratio}"
        assert found.losses == expected.losses, what
        assert_same(found.parameters, expected.parameters, what)
        assert spill_descriptors(folder) == []


@needs_torchao
@pytest.mark.parametrize("world", [1, 2, 3])
def test_codes_off_the_device_train_to_the_bits_of_codes_there(world: int, tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(world, _bits, folder)


def _step(model: nn.Module, optimizer: ShardedOptimizer, number: int, rank: int) -> None:
    _loss(model, Batch(number, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _parameters_too(rank: int, world: int, folder: Path) -> None:
    use_beside()
    plain = recipe(3, "bf16")
    setting = Setting(plan=plain, steps=3, clip=0.5, optimizer=_adam())
    expected = train(*shard_task(TASK, setting), TASK, setting, rank)
    for where in (None, folder):
        away = _offloaded(plain, where)
        assert away.offload is not None
        there = setting.at(replace(away, offload=replace(away.offload, param=True)))
        assert_same(train(*shard_task(TASK, there), TASK, there, rank).parameters, expected.parameters, f"{where}")


@needs_torchao
def test_parameters_in_host_memory_are_updated_on_their_way_through_the_device(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _parameters_too, folder)


def _bytes(rank: int, world: int, folder: Path) -> None:
    use_beside()
    for where, ratio in ((None, 1.0), (folder, 1.0), (folder, 0.7)):
        plan = _offloaded(recipe(3, "bf16"), where, ratio=ratio, host_ratio=0.0)
        model, optimizer = shard_task(TASK, Setting(plan=plan, optimizer=_adam()))
        made, tiers = zeroshard.plan_of(model), handle_of(model).runtime.storage.tiers
        assert Plan.from_json(made.to_json()) == made
        assert made.updates == {HostUpdate.STREAMED}
        assert isinstance(stepper_of(model), HostStateStepper)
        assert tiers[Tier.HOST].used == host_nbytes(made) == state_bytes(made).host
        if where is not None:
            memory = tiers[Tier.NVME]
            assert isinstance(memory, NvmeMemory)
            kinds = (StateKind.MASTER, StateKind.MOMENTS)
            assert memory.used == sum(g.held_on(Tier.NVME, kind) for _, g in made.groups() for kind in kinds)
            assert memory.used <= disk_nbytes(made)
        _step(model, optimizer, 0, rank)
        zeroshard.drain(model)
        held = held_bytes(model)
        expected = state_bytes(made)
        for name in ("param", "grad", "master", "gather_slots", "reduce_slots", "state_buffers", "host"):
            assert getattr(held, name) == getattr(expected, name), (where, ratio, name)
        in_memory = sum(tensor.nbytes for tensor in stepper_of(model).update.tensors().values())
        assert in_memory == expected.moments + sum(g.held_on(Tier.HOST, StateKind.MOMENTS) for _, g in made.groups())
        zeroshard.close(model)


@needs_torchao
def test_device_host_and_disk_hold_the_bytes_of_the_plan(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _bytes, folder)


def _skipped(rank: int, world: int, folder: Path) -> None:
    use_beside()
    away = partial(_offloaded, folder=folder, host_ratio=0.4)
    assert_a_skip_changes_nothing(TASK, recipe(3, "fp16"), away, rank, skipped=2, optimizer=_adam())


@needs_torchao
def test_a_step_that_is_skipped_in_float16_leaves_codes_on_disk_as_they_were(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _skipped, folder)


def _saved(rank: int, world: int, folder: Path, checkpoint: Path) -> None:
    use_beside()
    plain = recipe(3, "bf16")
    plans = {"device": plain, "away": _offloaded(plain, folder, ratio=0.8, host_ratio=0.4)}
    for tag, plan in plans.items():
        model, optimizer = shard_task(TASK, Setting(plan=plan, optimizer=_adam()))
        for number in range(2):
            _step(model, optimizer, number, 0)
        zeroshard.save(model, checkpoint, tag)
        zeroshard.close(model)


def _loaded(rank: int, world: int, folder: Path, checkpoint: Path) -> None:
    """At another number of ranks, from each place to the others."""
    use_beside()
    plain = recipe(3, "bf16")
    host, disk = _offloaded(plain, None), _offloaded(plain, folder, ratio=0.6)
    found: list[dict[str, torch.Tensor]] = []
    for tag, plan in (
        ("device", plain),
        ("away", plain),
        ("device", host),
        ("away", host),
        ("device", disk),
        ("away", disk),
    ):
        model, optimizer = shard_task(TASK, Setting(plan=plan, optimizer=_adam()))
        zeroshard.load(model, checkpoint, tag)
        states: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            state = zeroshard.safe_get_full_optimizer_state(parameter, "exp_avg_sq")
            assert state is not None
            states[f"state of {name}"] = state.cpu()
        weight = next(p for name, p in model.named_parameters() if "up.weight" in name)
        zeroshard.safe_set_full_optimizer_state(weight, torch.full((132, WIDTH), 0.5), "exp_avg")
        _step(model, optimizer, 2, 0)
        found.append({**full_parameters(model), **states})
        zeroshard.close(model)
    for other in found[1:]:
        assert_same(other, found[0], "loaded, set and trained on")


@needs_torchao
def test_checkpoints_of_codes_go_on_at_other_ranks_and_in_other_places_to_the_bit(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _saved, folder, tmp_path / "saved")
        run_ranks(1, _loaded, folder, tmp_path / "saved")


def _steps(model: nn.Module, optimizer: ShardedOptimizer, rank: int) -> None:
    for number in range(1, 50):
        _step(model, optimizer, number, rank)


def _fails(rank: int, world: int, folder: Path) -> None:
    use_beside()
    spill = Spill((str(folder),))
    for write in (False, True):
        transfers = FailingTransfers(OSError(errno.EIO, "Input/output error"), write=write)

        def memory(plan: Plan, device: torch.device, found: FailingTransfers = transfers) -> NvmeMemory:
            return NvmeMemory(spill, 0, disk_nbytes(plan), make_transfers=lambda: found)

        model = build(TASK)
        plan = _offloaded(recipe(3, "bf16"), folder, host_ratio=0.4)
        model, optimizer = zeroshard.shard(model, _adam()(model), plan=plan, tiers={Tier.NVME: memory})
        _step(model, optimizer, 0, rank)
        transfers.fail_after(20)
        for _ in range(2):  # the state is a step ahead in parts, so it stays an error
            with pytest.raises(SpillError, match=f"rank 0: a (read of|write to) its file in {folder} failed"):
                _steps(model, optimizer, rank)
        with pytest.raises(SpillError, match="rank 0"):
            zeroshard.save(model, folder / "saved", "after")
        zeroshard.close(model)


@needs_torchao
def test_a_disk_that_fails_amid_an_update_of_codes_ends_the_run_by_name(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(1, _fails, folder)


def _refused(rank: int, world: int, folder: Path) -> None:
    use_beside()
    plain = recipe(3, "bf16")
    away = _offloaded(plain, folder)
    assert away.offload is not None
    cases = [
        (replace(away.offload, update=HostUpdate.PROCESSOR), "the processor has no kernel for moments in 8 or 4 bits"),
        (replace(away.offload, param=True, param_tier=Tier.NVME), "parameters on disk are updated by the processor"),
    ]
    for offload, message in cases:
        model = build(TASK)
        with pytest.raises(PlanError, match=message):
            zeroshard.shard(model, _adam()(model), plan=replace(plain, offload=offload))
        assert spill_descriptors(folder) == []
    assert Blocks(8, 256).whole(255) == 256
    assert Blocks(8, 256).whole(1500) == 1280


@needs_torchao
def test_what_codes_can_not_do_off_the_device_is_refused_by_name(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(1, _refused, folder)
