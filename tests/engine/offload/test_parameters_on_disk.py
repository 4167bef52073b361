"""Parameters on disk train to the bits of parameters in host memory, through windows that no number of units widens."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.engine.offload.test_on_disk import BLOCK_OF_ELEMENTS, TASK, Deep
from tests.support.disk import CountedDisk, FailingTransfers, disk_folder, spill_descriptors
from tests.support.distributed import run_ranks
from tests.support.models import Batch, Task, square_loss
from tests.support.offload import assert_a_skip_changes_nothing, offloaded, recipe, train
from tests.support.patience import Patience
from tests.support.training import Setting, adamw, assert_same, build, full_parameters, sgd, shard_task
from zeroshard.engine.closing import close_handle
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.core.virtual_streams import Pace, VirtualStreams
from zeroshard.errors import PlanError, SpillError, ZeroShardError
from zeroshard.nvme.memory import NvmeMemory
from zeroshard.nvme.places import Spill
from zeroshard.optim.optimizer import ShardedOptimizer
from zeroshard.plan.builder import Recipe
from zeroshard.plan.memory import state_bytes
from zeroshard.plan.offload import READ_WINDOWS, Offload, disk_nbytes, host_nbytes, read_window_nbytes, window_nbytes
from zeroshard.plan.placement import StateKind, Tier
from zeroshard.plan.plan import Plan
from zeroshard.plan.policy import HostUpdate
from zeroshard.plan.program import OpKind, build_programs
from zeroshard.plan.traffic import disk_traffic

HOST = offloaded(recipe(3, "bf16"), param=True)


def in_files(
    plan: Recipe,
    *folders: Path,
    state: Tier = Tier.NVME,
    window: int = BLOCK_OF_ELEMENTS,
    encrypt: bool = False,
) -> Recipe:
    """A recipe with parameters in host memory, here in files; and the optimizer's state in files or there."""
    assert plan.offload is not None
    spill = Spill(tuple(map(str, folders)), encrypt)
    offload = replace(plan.offload, tier=state, param_tier=Tier.NVME, spill=spill, window_numel=window)
    return replace(plan, offload=offload)


class Adapted(Deep):
    """Large weights that are frozen beside small ones that train, in each unit."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            for parameter in block[0].parameters():  # pyright: ignore[reportIndexIssue]
                parameter.requires_grad_(False)


ADAPTED = Task(Adapted, square_loss)
CASES: list[tuple[Task, int, Tier, str | None, int, Callable[[nn.Module], torch.optim.Optimizer]]] = [
    # micro-batches, where the optimizer's state rests, compute dtype, elements of a window
    (TASK, 1, Tier.NVME, "bf16", BLOCK_OF_ELEMENTS, adamw),
    (TASK, 2, Tier.HOST, "bf16", 300, adamw),
    (TASK, 1, Tier.HOST, None, BLOCK_OF_ELEMENTS, sgd),
    (TASK, 2, Tier.NVME, None, 300, adamw),
    (ADAPTED, 1, Tier.NVME, "bf16", 300, adamw),
]


def _bits(rank: int, world: int, folder: Path) -> None:
    for task, micro, state, param, window, optimizer in CASES:
        plan = offloaded(recipe(3, param), param=True)
        setting = Setting(plan=plan, steps=3, micro=micro, clip=0.5, optimizer=optimizer)
        expected = train(*shard_task(task, setting), task, setting, rank)
        disk = setting.at(in_files(plan, folder, state=state, window=window))
        found = train(*shard_task(task, disk), task, disk, rank)
        what = f"{micro} micro-batches, state on {state.value}, {param}, windows of {window}, {optimizer.__name__}"
        assert found.losses == expected.losses, what
        assert_same(found.parameters, expected.parameters, what)
        assert spill_descriptors(folder) == [], "closing the model gives the space back"


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_on_disk_give_the_bits_of_parameters_in_host_memory(world: int, tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(world, _bits, folder)


def _striped_and_encrypted(rank: int, world: int, folder: Path, encrypt: bool) -> None:
    setting = Setting(plan=HOST, steps=3, clip=0.5)
    expected = train(*shard_task(TASK, setting), TASK, setting, rank)
    disk = setting.at(in_files(HOST, folder / "a", folder / "b", encrypt=encrypt))
    assert_same(train(*shard_task(TASK, disk), TASK, disk, rank).parameters, expected.parameters, f"{encrypt}")


@pytest.mark.parametrize("encrypt", [False, True])
def test_several_folders_and_encryption_change_no_bits(tmp_path: Path, encrypt: bool) -> None:
    if encrypt:
        pytest.importorskip("cryptography")
    with disk_folder(tmp_path) as folder:
        for name in ("a", "b"):
            (folder / name).mkdir()
        run_ranks(2, _striped_and_encrypted, folder, encrypt)


def _train_on(streams: VirtualStreams, plan: Recipe, rank: int) -> dict[str, torch.Tensor]:
    model = build(TASK)
    model, optimizer = zeroshard.shard(model, adamw(model), plan=plan, clip_norm=0.5, streams=streams)
    return train(model, optimizer, TASK, Setting(plan=plan, steps=3), rank).parameters


def _all_orders(rank: int, world: int, folder: Path) -> None:
    policy = replace(HOST.policy, prefetch=2, overlap_step=True, reuse=False)
    plan = in_files(replace(HOST, policy=policy), folder)
    setting = Setting(plan=HOST, steps=3, clip=0.5)
    expected = train(*shard_task(TASK, setting), TASK, setting, rank).parameters
    for pace, seed in ((Pace.EAGER, 0), (Pace.LAZY, 0), (Pace.MIXED, rank)):
        streams = VirtualStreams(Patience(), pace=pace, seed=seed)
        assert_same(_train_on(streams, plan, rank), expected, pace.value)


def test_every_order_that_the_events_allow_gives_the_same_bits(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _all_orders, folder)


def _bytes(rank: int, world: int, folder: Path) -> None:
    for micro, reuse, param, state in ((1, True, "bf16", Tier.NVME), (2, False, None, Tier.HOST)):
        plain = offloaded(recipe(3, param), param=True)
        plain = replace(plain, policy=replace(plain.policy, reuse=reuse))
        counted, model = CountedDisk(folder, rank), build(TASK)
        model, optimizer = zeroshard.shard(
            model,
            adamw(model),
            plan=in_files(plain, folder, state=state),
            accumulate=micro > 1,
            tiers={Tier.NVME: counted},
        )
        plan, memory = zeroshard.plan_of(model), counted.made
        assert memory is not None
        kinds = (StateKind.PARAM, StateKind.MASTER, StateKind.MOMENTS)
        assert memory.used == sum(group.held_on(Tier.NVME, kind) for _, group in plan.groups() for kind in kinds)
        assert state_bytes(plan).disk == disk_nbytes(plan) >= memory.used
        assert state_bytes(plan).param == 0
        host = handle_of(model).runtime.storage.tiers[Tier.HOST]
        assert host.used == host_nbytes(plan) == state_bytes(plan).host
        for number in range(4):
            zeroshard.drain(model)
            memory.read = memory.written = 0
            for one in range(micro):
                TASK.loss(model, Batch(number, one, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        zeroshard.drain(model)
        found, moved = disk_traffic(zeroshard.plan_of(model), micro_batches=micro), (memory.read, memory.written)
        assert moved == (found.gathered + found.read, found.written), (micro, reuse)
        zeroshard.close(model)


def test_memory_and_what_passes_the_disk_are_the_bytes_of_the_plan(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _bytes, folder)


class Many(nn.Sequential):
    """Units of one size, of any number."""

    def __init__(self, number: int) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48)) for _ in range(number)))


def _windows(rank: int, world: int, folder: Path, number: int) -> tuple[int, int]:
    """Bytes of host memory that are taken, without gradients, and the plan's figure for them."""
    task = Task(lambda: Many(number), square_loss)
    model, _ = shard_task(task, Setting(plan=in_files(HOST, folder, window=2048)))
    plan = zeroshard.plan_of(model)
    host = handle_of(model).runtime.storage.tiers[Tier.HOST]
    grads = sum(group.held_on(Tier.HOST, StateKind.GRAD) for _, group in plan.groups())
    zeroshard.close(model)
    return host.used - grads, window_nbytes(plan) + READ_WINDOWS * read_window_nbytes(plan)


def test_host_memory_for_parameters_and_state_does_not_grow_with_the_number_of_units(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        taken = [found for number in (2, 9) for found in run_ranks(1, _windows, folder, number)]
    assert taken[0] == taken[1]
    assert taken[0][0] == taken[0][1]


def _read_two_gathers_ahead(rank: int, world: int, folder: Path) -> None:
    model, _ = shard_task(TASK, Setting(plan=in_files(HOST, folder)))
    plan = zeroshard.plan_of(model)
    for program in (build_programs(plan).forward, build_programs(plan).backward):
        gathers = [op.unit for op in program if op.kind is OpKind.GATHER]
        reads = [op.unit for op in program if op.kind is OpKind.READ]
        assert reads == gathers
        for number, unit in enumerate(reads):
            place = [at for at, op in enumerate(program) if op.kind is OpKind.READ][number]
            before = [op.unit for op in program[:place] if op.kind is OpKind.GATHER]
            assert before == gathers[: max(0, number - 1)], (unit, "is read when the one two before it is gathered")
    zeroshard.close(model)


def test_a_unit_is_read_while_the_two_before_it_are_gathered(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(1, _read_two_gathers_ahead, folder)


def _step(model: nn.Module, optimizer: ShardedOptimizer, number: int, rank: int) -> None:
    TASK.loss(model, Batch(number, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _looked_at(model: nn.Module) -> dict[str, torch.Tensor]:
    """What readers from outside find, after each has also written."""
    first, second = [p for p in model.parameters() if p.ndim == 2][:2]
    with zeroshard.GatheredParameters([first], modifier_rank=0), torch.no_grad():
        first[0] += 0.5
    zeroshard.safe_set_full_fp32_param(second, zeroshard.safe_get_full_fp32_param(second) * 1.5)
    found = {"fp32": zeroshard.safe_get_full_fp32_param(first)}
    state = zeroshard.safe_get_full_optimizer_state(second, "exp_avg_sq")
    assert state is not None
    with zeroshard.GatheredParameters([second]):
        found["gathered"] = second.detach().clone()
    compute = {f"compute {name}": value for name, value in zeroshard.iterate_full_parameters(model, master=False)}
    return {**found, **compute, "state": state}


def _saved(rank: int, world: int, folder: Path, checkpoint: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for tag, plan in (("host", HOST), ("disk", in_files(HOST, folder))):
        model, optimizer = shard_task(TASK, Setting(plan=plan))
        for number in range(2):
            _step(model, optimizer, number, rank)
        found.append(_looked_at(model))
        _step(model, optimizer, 2, rank)
        zeroshard.save(model, checkpoint, tag)
        found[-1] |= full_parameters(model)
        zeroshard.close(model)
        with zeroshard.GatheredParameters(model.parameters()):
            found[-1] |= {f"closed {name}": value.detach().clone() for name, value in model.named_parameters()}
    assert_same(found[1], found[0], "read and written from outside")


def _loaded(rank: int, world: int, folder: Path, checkpoint: Path) -> None:
    """At another number of ranks: from disk to disk and to host memory, and from host memory to disk."""
    found: list[dict[str, torch.Tensor]] = []
    disk = in_files(HOST, folder)
    for tag, plan in (("host", HOST), ("disk", HOST), ("disk", disk), ("host", disk)):
        model, optimizer = shard_task(TASK, Setting(plan=plan))
        zeroshard.load(model, checkpoint, tag)
        _step(model, optimizer, 3, 0)
        found.append(full_parameters(model))
        zeroshard.close(model)
    for other in found[1:]:
        assert_same(other, found[0], "loaded and trained on")


def test_readers_writers_and_checkpoints_find_what_host_memory_has(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _saved, folder, tmp_path / "saved")
        run_ranks(1, _loaded, folder, tmp_path / "saved")


def _skips(rank: int, world: int, folder: Path) -> None:
    plain = offloaded(recipe(3, "fp16"), param=True)
    assert_a_skip_changes_nothing(TASK, plain, lambda plan: in_files(plan, folder), rank, skipped=1)


def test_a_step_that_is_skipped_in_float16_leaves_the_disk_as_it_was(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(1, _skips, folder)


class _Disk:
    """Makes the memory of one rank, on a disk that fails when it is told to."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._spill, self._rank = Spill((str(folder),)), rank
        self.transfers = FailingTransfers(OSError(errno.EIO, "Input/output error"), write=False)

    def __call__(self, plan: Plan, device: torch.device) -> NvmeMemory:
        return NvmeMemory(self._spill, self._rank, disk_nbytes(plan), make_transfers=lambda: self.transfers)


def _read_fails(rank: int, world: int, folder: Path) -> None:
    disk, model = _Disk(folder, rank), build(TASK)
    plan = in_files(HOST, folder, state=Tier.HOST)
    model, optimizer = zeroshard.shard(model, adamw(model), plan=plan, tiers={Tier.NVME: disk})
    _step(model, optimizer, 0, rank)
    zeroshard.drain(model)
    if rank == 1:
        disk.transfers.fail_after(0)
    with pytest.raises(ZeroShardError, match=rf"rank 1: a read of its file in {folder} failed: .*errno 5") as caught:
        TASK.loss(model, Batch(1, 0, rank)).backward()
    assert isinstance(caught.value, SpillError) == (rank == 1)
    zeroshard.close(model)
    assert spill_descriptors(folder) == []


def test_a_disk_that_fails_under_a_forward_ends_it_on_all_ranks_with_folder_and_rank(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _read_fails, folder)


def _begin(disk: _Disk, folder: Path, rank: int) -> None:
    model = build(TASK)
    model, optimizer = zeroshard.shard(model, adamw(model), plan=in_files(HOST, folder), tiers={Tier.NVME: disk})
    _step(model, optimizer, 0, rank)


def _reader_fails(rank: int, world: int, folder: Path) -> None:
    disk, model = _Disk(folder, rank), build(TASK)
    model, optimizer = zeroshard.shard(model, adamw(model), plan=in_files(HOST, folder), tiers={Tier.NVME: disk})
    _step(model, optimizer, 0, rank)
    zeroshard.drain(model)
    if rank == 1:
        disk.transfers.fail_after(0)
    with (
        pytest.raises(ZeroShardError, match=rf"rank 1: a read of its file in {folder} failed: .*errno 5"),
        zeroshard.GatheredParameters(model.parameters()),
    ):
        raise AssertionError("nothing was gathered")
    zeroshard.close(model)  # nothing is held


def test_a_disk_that_fails_under_a_reader_outside_of_a_step_ends_it_on_all_ranks(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _reader_fails, folder)


def _first_values_fail(rank: int, world: int, folder: Path) -> None:
    disk = _Disk(folder, rank)
    disk.transfers = FailingTransfers(OSError(errno.ENOSPC, "No space left on device"), write=True)
    if rank == 1:
        disk.transfers.fail_after(1)
    with pytest.raises(ZeroShardError, match=rf"rank 1: a write to its file in {folder} failed") as caught:
        _begin(disk, folder, rank)
    assert isinstance(caught.value, SpillError) == (rank == 1)


def test_a_disk_that_fails_under_the_first_values_ends_the_start_on_all_ranks(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _first_values_fail, folder)


def _too_large_to_close(rank: int, world: int, folder: Path) -> None:
    for plan, lost in ((in_files(HOST, folder), True), (in_files(HOST, folder, state=Tier.HOST), False)):
        model, optimizer = shard_task(TASK, Setting(plan=plan))
        _step(model, optimizer, 0, rank)
        close_handle(handle_of(model), available=lambda: 1 << 20)
        with zeroshard.GatheredParameters(model.parameters()):
            assert all(bool(p.isnan().all()) == lost for p in model.parameters()), "master weights in memory stay"
        assert spill_descriptors(folder) == []


def test_closing_never_takes_more_host_memory_than_there_is(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(2, _too_large_to_close, folder)


def _by_config(rank: int, world: int, folder: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    nvme: dict[str, Any] = {"device": "nvme", "nvme_path": [str(folder / "a"), str(folder / "b")], "buffer_count": 3}
    for param, remote in (({"device": "cpu"}, None), (nvme, "nvme")):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": param,
            },
        }
        torch.manual_seed(3)
        with zeroshard.Init(remote_device=remote):
            model = Deep()
        engine, *_ = zeroshard.initialize(model=model, config=config)
        tiers = {group.param.tier for _, group in zeroshard.plan_of(engine.module).groups()}
        assert tiers == ({Tier.HOST} if remote is None else {Tier.NVME})
        for number in range(2):
            engine.backward(TASK.loss(engine, Batch(number, 0, rank)).float())
            engine.step()
        found.append(full_parameters(engine.module))
        engine.destroy()
    assert_same(found[1], found[0], "by a config")


def test_a_config_and_an_init_say_it_too(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        for name in ("a", "b"):
            (folder / name).mkdir()
        run_ranks(2, _by_config, folder)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"param_tier": Tier.NVME}, "needs param=True"),
        ({"param": True, "param_tier": Tier.DEVICE}, "must be Tier.HOST or Tier.NVME"),
        ({"param": True, "param_tier": Tier.NVME, "ratio": 0.5}, "needs all of the optimizer's state there"),
        ({"host_ratio": 0.5}, "needs tier=Tier.NVME"),
        ({"tier": Tier.NVME, "ratio": 0.25, "host_ratio": 0.5}, "between 0 and the ratio"),
        ({"host_ratio": "half"}, "must be a number"),
        ({"spill": Spill(("/a",))}, "needs tier or param_tier to be Tier.NVME"),
    ],
)
def test_what_can_not_be_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        Offload(**wrong)


def _refused(rank: int, world: int, folder: Path) -> None:
    model = build(TASK)
    streamed = offloaded(recipe(3, "bf16"), HostUpdate.STREAMED, param=True)
    with pytest.raises(PlanError, match="param rests on 'nvme', which the processor has to update"):
        zeroshard.shard(model, adamw(model), plan=in_files(streamed, folder, state=Tier.HOST))
    assert HOST.offload is not None
    nowhere = replace(HOST, offload=replace(HOST.offload, param_tier=Tier.NVME))
    with pytest.raises(PlanError, match=r"param rests on 'nvme', but no folder is named"):
        zeroshard.shard(model, adamw(model), plan=nowhere)


def test_what_the_machine_does_not_have_is_refused_at_start(tmp_path: Path) -> None:
    with disk_folder(tmp_path) as folder:
        run_ranks(1, _refused, folder)
